"""Megatron models whose experts get other ids between optimizer steps, with all that belongs to these."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.accelerator import LAZY
from helpers.examples import examples, nightly_except
from helpers.megatron_renumbering import BY_POSITION, RESHARDABLE, Pair, compare_checkpoints, save_checkpoints
from helpers.megatron_runs import Layout, MegatronCase, use_layout
from helpers.rank_pool import on_ranks
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError, RanksDisagreeError

EP_2 = Layout(2, 2)
LAYOUTS = {
    "EP 2": EP_2,
    "EP 2 x expert-DP 2": Layout(4, 2),
    "PP 2 x EP 2": Layout(4, 2, pipeline=2),
    "TP 2 x EP 2": Layout(2, 2, tensor=2),
}
CASES = [
    MegatronCase(adam=True, double=True, balanced_routers=True),
    MegatronCase(adam=True, bf16=True),
    MegatronCase(distributed_optimizer=True),
    MegatronCase(distributed_optimizer=True, bf16=True, overlap=True),
]
MORE = [
    MegatronCase(adam=True),
    MegatronCase(distributed_optimizer=True, overlap=True),
    MegatronCase(distributed_optimizer=True, grouped=True),
    MegatronCase(adam=True, double=True, frozen=True),
]
# In the short form.
CASES_OF = {"EP 2": CASES, "EP 2 x expert-DP 2": CASES[2:], "PP 2 x EP 2": CASES[::3], "TP 2 x EP 2": CASES[2:3]}
STEPS = examples(short=4, long=20)


def on_megatron(function: Any, *args: Any, ranks: int, ways: str = "") -> None:
    on_ranks(function, args, ranks=ranks, patched="megatron", ways=ways)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("layout", "ways"),
    nightly_except(
        [*((layout, "") for layout in LAYOUTS), *examples(short=[], long=[("EP 2", LAZY)])],
        ("EP 2", ""), ("TP 2 x EP 2", ""),
    ),
)  # fmt: skip
def test_renumbered_models_train_as_models_with_first_ids(layout: str, ways: str) -> None:
    cases = examples(short=CASES_OF[layout][: 1 if ways else None], long=CASES + MORE)
    if ways:
        # Simulated devices know no reduce-scatter, and no autocast of late operations.
        cases = [case for case in cases if not (case.distributed_optimizer or case.bf16)]
    on_megatron(train, LAYOUTS[layout], cases, ranks=LAYOUTS[layout].ranks, ways=ways)


def train(layout: Layout, cases: list[MegatronCase]) -> None:
    """Live steps and planned ones with replicas; experts get other ids before some of them."""
    from megatron import core

    use_layout(layout)
    for case in cases:
        pair = Pair(layout, case)
        pair.train(STEPS)
        # Megatron 0.19 computes auxiliary losses in float32.
        exact = 2e-7 if case.balanced_routers and not core.__version__.startswith("0.16") else 1e-12
        of_weights, most = (exact, exact) if case.double else (2e-2, 2e-2) if case.bf16 else (2e-7, 1e-5)
        assert pair.weights_error() < of_weights, (case, pair.weights_error())
        has_experts = pair.session.session is not None
        assert pair.renumbered > 0 or not has_experts
        assert pair.replicas > 0 or not has_experts
        error = pair.difference()
        assert error < most, (case, error)
        pair.session.remove()


@pytest.mark.longer
@pytest.mark.parametrize(
    ("saved", "kind"),
    nightly_except(
        [("EP 2, Adam", RESHARDABLE), *((layout, kind) for layout in LAYOUTS for kind in (RESHARDABLE, BY_POSITION))],
        ("EP 2, Adam", RESHARDABLE), ("PP 2 x EP 2", RESHARDABLE), ("EP 2 x expert-DP 2", BY_POSITION),
    ),
)  # fmt: skip
def test_plain_megatron_loads_checkpoints_of_renumbered_models(saved: str, kind: str, tmp_path: Path) -> None:
    """On other ranks and stages too; with plain Adam, and with state by its place in buffers, on the same only."""
    layout = LAYOUTS[saved.removesuffix(", Adam")]
    case = MegatronCase(distributed_optimizer="Adam" not in saved, adam=True, pipelined_layers=True)
    on_megatron(save_checkpoints, layout, case, str(tmp_path), 2, kind, ranks=layout.ranks)
    others = [Layout(2, 2), Layout(4, 2), Layout(4, 4), Layout(4, 2, pipeline=2)]
    is_fixed = "Adam" in saved or kind == BY_POSITION
    for each in [layout] if is_fixed else examples(short=[Layout(4, 4)], long=others):
        on_megatron(compare_checkpoints, each, case, str(tmp_path), kind, ranks=each.ranks)


@pytest.mark.parametrize("is_distributed", [False, True])
@runs_on_ranks(2, "megatron")
def test_gradients_that_no_optimizer_has_used_are_not_lost(is_distributed: bool) -> None:
    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(adam=True, distributed_optimizer=is_distributed))
    model, tokens_MBS = pair.other, pair.tokens()

    def refused() -> bool:
        try:
            pair.renumber()
        except RuntimeError as error:
            assert "gradients that wait for an optimizer step" in str(error)
            return True
        return False

    model.zero()
    assert not refused()
    # A forward alone adds nothing.
    model.run(pair.function, tokens_MBS, forward_only=True)
    assert not refused()
    model.run(pair.function, tokens_MBS)
    assert refused()
    parts = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    fails = mock.patch.object(parts[-1], "prepare_grads", side_effect=ValueError("in a step"))
    with fails, pytest.raises(ValueError, match="in a step"):
        model.optimizer.step()
    assert refused()
    model.optimizer.step()
    assert not refused()
    model.run(pair.function, tokens_MBS)
    # Those of one rank, and of the router alone.
    if dist.get_rank() == 0:
        model.zero()
    assert refused()
    model.zero()
    router = next(iter(model.moe_layers())).router.weight
    router.main_grad.fill_(dist.get_rank())
    assert refused()
    model.zero()
    assert not refused()
    pair.session.remove()


@pytest.mark.parametrize("is_distributed", [False, True])
@runs_on_ranks(2, "megatron")
def test_what_can_not_be_renumbered_is_refused(is_distributed: bool) -> None:
    from trimtab.integrations.megatron import balance
    from trimtab.integrations.megatron.optimizer_state import optimizers_in

    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(distributed_optimizer=is_distributed, adam=True))
    pair.zero()
    pair.live_step(pair.tokens())
    pair.other.optimizer.step()
    states = [state for each in optimizers_in(pair.other.optimizer) for state in each.optimizer.state.values()]
    for state in states:
        state["step"] += dist.get_rank()
    order_LE = np.tile(np.roll(np.arange(pair.first_LE.shape[1]), 1), (len(pair.first_LE), 1))
    with pytest.raises((InputError, RanksDisagreeError), match=r"optimizer.* state of .*step"):
        pair.session.renumber(order_LE)
    for state in states:
        state["step"] -= dist.get_rank()
    with pytest.raises(RanksDisagreeError, match="order_LE"):
        pair.session.renumber(np.roll(order_LE, dist.get_rank(), axis=1))
    with pytest.raises(InputError, match="registered already"):
        pair.session.register_optimizer(pair.other.optimizer)
    pair.session.remove()
    assert "step" not in vars(pair.other.optimizer)
    pair.zero()
    next(iter(pair.other.moe_layers())).router.register_buffer("of_tokens", torch.zeros(3))
    session = balance(pair.other.chunks)
    with pytest.raises(InputError, match="register_optimizer"):
        session.renumber(order_LE)
    session.register_optimizer(pair.other.optimizer)
    with pytest.raises(InputError, match="nothing says what its router has of each expert"):
        session.renumber(order_LE)
    session.remove()


def test_optimizers_whose_state_can_not_be_permuted_are_named() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

    from trimtab.integrations.megatron.optimizer_state import optimizers_in

    def distributed(**options: Any) -> Any:
        made = DistributedOptimizer.__new__(DistributedOptimizer)
        ddp = {"use_megatron_fsdp": False, "num_distributed_optimizer_instances": 1} | options
        made.config, made.ddp_config, made.optimizer = SimpleNamespace(**options), SimpleNamespace(**ddp), None
        made.is_stub_optimizer = False
        return made

    refused = {
        "optimizer_cpu_offload": True, "use_precision_aware_optimizer": True, "use_megatron_fsdp": True,
        "num_distributed_optimizer_instances": 2,
    }  # fmt: skip
    for option, value in refused.items():
        with pytest.raises(InputError, match=f"state of DistributedOptimizer: .*{option}"):
            optimizers_in(distributed(**{option: value}))
    with pytest.raises(InputError, match="LayerWiseDistributedOptimizer: use one of FP32Optimizer, "):
        optimizers_in(LayerWiseDistributedOptimizer.__new__(LayerWiseDistributedOptimizer))
    stub = FP32Optimizer.__new__(FP32Optimizer)
    stub.is_stub_optimizer = True
    chained = ChainedOptimizer.__new__(ChainedOptimizer)
    fine = distributed()
    chained.chained_optimizers = [stub, fine]
    assert optimizers_in(chained) == [fine]


@runs_on_ranks(2, "megatron")
def test_a_reference_that_is_swapped_in_by_position_computes_what_it_did() -> None:
    """Frameworks load a reference's weights into the same Parameters, and run passes without plans."""
    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(adam=True, double=True))
    model, tokens_MBS = pair.other, pair.tokens()
    parameters = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
    reference = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        expected = model.run(pair.function, tokens_MBS, forward_only=True)
        pair.train(3)
        trained = model.run(pair.function, tokens_MBS, forward_only=True)
        mine = [parameter.detach().clone() for parameter in parameters]
        for values, wanted in ((reference, expected), (mine, trained)):
            for parameter, value in zip(parameters, values, strict=True):
                parameter.data.copy_(value)
            assert model.run(pair.function, tokens_MBS, forward_only=True) == wanted
    pair.session.remove()


@runs_on_ranks(2, "megatron")
def test_a_session_is_removed_amid_a_failed_step() -> None:
    """No rank waits for another; the model is then Megatron's again."""
    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(adam=True, double=True))
    tokens_MBS = pair.tokens()
    routing = pair.plain.record(pair.function, tokens_MBS)
    layer = next(iter(pair.other.moe_layers()))

    def fail(*_args: Any) -> None:
        raise OSError("the test's")

    pair.zero()
    hook = layer.router.register_forward_hook(fail)
    with pytest.raises(OSError, match="the test's"):
        pair.other.run(pair.session.planned(pair.function, routing), tokens_MBS)
    hook.remove()
    if dist.get_rank():
        pair.session.remove()
    dist.barrier()
    pair.session.remove()
    pair.zero()
    pair.live_step(tokens_MBS)
    for model in (pair.plain, pair.other):
        model.optimizer.step()
    assert pair.difference() < 1e-12
