"""Megatron with Transformer Engine's grouped product, fused gradient accumulation, DeepEP and HybridEP.

All four are replacements in plain torch with their public contract; see `fake_te` and `fake_deep_ep`. No test here
reaches the libraries themselves, which need a GPU.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core.transformer.transformer_config import TransformerConfig

from helpers import fake_deep_ep
from helpers.fake_te import GroupedLinear
from helpers.framework_signatures import parameters_in
from helpers.megatron_fakes import FAKES_LAYOUT, State, pool_with_fakes, replace_libraries  # noqa: F401
from helpers.megatron_runs import Layout, MegatronCase, Model, compare_runs, use_layout
from helpers.rank_pool import on_ranks
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from trimtab.errors import InputError
from trimtab.runtime.live.balancer import LivePolicy
from trimtab.runtime.program.program import Arrivals

CASES = {
    "grouped": MegatronCase(grouped=True, double=True, bias=True, recompute="moe_act"),
    "grouped fused": MegatronCase(grouped=True, fused=True, double=True, pipelined_layers=True),
    "grouped fused frozen": MegatronCase(grouped=True, fused=True, double=True, frozen=True, recompute="moe"),
    "grouped fused overlap": MegatronCase(grouped=True, fused=True, overlap=True, distributed_optimizer=True),
    "fused": MegatronCase(fused=True),
    "deepep": MegatronCase(flex="deepep", double=True),
    "latent": MegatronCase(double=True, options={"moe_latent_size": 8}),
    "grouped interleaved": MegatronCase(grouped=True, double=True, options={"moe_mlp_glu_interleave_size": 2}),
}
OPTIONS = {field.name for field in fields(TransformerConfig)}


@pytest.mark.longer
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.options.keys() <= OPTIONS])
@runs_on_ranks()
def test_balanced_run_equals_megatrons_own(state: State, name: str) -> None:
    # Adam multiplies rounding errors of float32, which are 1e-6 in the first step.
    assert max(compare_runs(FAKES_LAYOUT, [CASES[name]])) < (1e-12 if CASES[name].double else 1e-4)


@runs_on_ranks()
def test_gradients_of_replicas_in_bfloat16_models_are_as_exact_as_those_of_homes(state: State) -> None:
    # Those of weights are summed in float32. A rounding to bfloat16 is 4e-3.
    assert max(compare_runs(FAKES_LAYOUT, [MegatronCase(grouped=True, fused=True, bf16=True, steps=1)])) < 1e-5


@pytest.mark.parametrize(("fused", "live"), [(True, None), (False, None), (True, "quota")])
@runs_on_ranks()
def test_products_of_planned_layers_have_home_experts_and_replicas(
    state: State, fused: bool, live: LivePolicy | None
) -> None:
    """Live layers multiply home experts first, while replicas are on the way."""
    sizes: list[int] = []
    plain = GroupedLinear.forward

    def counted(product: GroupedLinear, inp: torch.Tensor, m_splits: Any) -> Any:
        sizes.append(product.num_gemms)
        return plain(product, inp, m_splits)

    homes = 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupedLinear, "forward", counted)
        case = MegatronCase(grouped=True, fused=fused, steps=1, live=live, double=True)
        assert max(compare_runs(FAKES_LAYOUT, [case])) < 1e-12
    if live:
        assert min(sizes) < homes
        assert max(sizes) == homes
    else:
        assert min(sizes) == homes
        assert max(sizes) > homes


@runs_on_ranks()
def test_one_hybridep_buffer_serves_home_and_physical_experts(state: State) -> None:
    case = MegatronCase(flex="hybridep", grouped=True, fused=True, double=True, recompute="moe")
    assert max(compare_runs(FAKES_LAYOUT, [case])) < 1e-12
    from megatron.core.transformer.moe import fused_a2a

    buffer: Any = fused_a2a._hybrid_ep_buffer
    # 8 experts on 2 ranks, with 2 slots each.
    assert (buffer.compiled, buffer.enlarged) == ({4, 6}, 1)
    # Megatron's own calls wait for sizes, those of physical experts do not.
    assert buffer.waited == {4}


@runs_on_ranks()
def test_deepep_gets_planned_experts_with_weight_0(state: State) -> None:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from trimtab.integrations.megatron.physical_dispatch import physical_dispatcher, start_rows

    layer = next(Model(FAKES_LAYOUT, MegatronCase(flex="deepep")).moe_layers())
    physical = physical_dispatcher(layer, 2, get_default_pg_collection())
    ids = torch.tensor([[11, 4], [5, 8], [10, 9]], dtype=torch.uint16)
    weights = torch.tensor([[0.0, 1.0], [0.3, 0.7], [0.0, 0.0]])
    layer_call: Any = SimpleNamespace(layout=SimpleNamespace(physical_ids=ids), is_live=False)
    start_rows(physical, torch.zeros(3, 1, 16), weights, layer_call)
    manager: Any = physical._comm_manager  # type: ignore[union-attr]
    assert manager.token_indices.tolist() == ids.tolist()
    assert torch.allclose(manager.token_probs, weights)


@pytest.mark.parametrize(
    ("kind", "live"), [("one node", None), ("one node", "quota"), ("nodes", None), ("older", None)]
)
@runs_on_ranks()
def test_planned_sizes_reach_deepep(state: State, kind: str, live: LivePolicy | None) -> None:
    """Where DeepEP can't use them, the host waits for the counts, and results are the same."""
    from megatron.core.transformer.moe import fused_a2a

    vars(fused_a2a)["_buffer"] = None
    buffer_type, layout, dispatch = (
        fake_deep_ep.Buffer,
        fake_deep_ep.Buffer.get_dispatch_layout,
        fake_deep_ep.Buffer.dispatch,
    )

    def across_nodes(buffer: Any, *args: Any, **options: Any) -> Any:
        per_rank, _, *others = layout(buffer, *args, **options)
        return per_rank, per_rank, *others

    def older(buffer: Any, x: Any, handle: Any = None, **options: Any) -> Any:
        assert "num_worst_tokens" not in options
        return dispatch(buffer, x, handle, **options)

    case = MegatronCase(flex="deepep", grouped=True, fused=True, double=True, recompute="moe", live=live)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "nodes":
            patch.setattr(buffer_type, "get_dispatch_layout", across_nodes)
        if kind == "older":
            patch.setattr(buffer_type, "dispatch", older)
        assert max(compare_runs(FAKES_LAYOUT, [case])) < 1e-12
    buffer: Any = fused_a2a._buffer
    # Megatron's own calls wait, with 4 experts on each rank; those with 2 slots do not.
    assert buffer.waited == ({4} if kind == "one node" else {4, 6})
    # Freed without garbage collection, which ranks do at different times.
    freed = weakref.ref(buffer)
    del buffer
    vars(fused_a2a)["_buffer"] = None
    assert freed() is None


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["all", "one rank", "one expert", "slots"])
def test_deepep_without_waits_equals_an_all_to_all(ranks: int, kind: str) -> None:
    on_ranks(check_dispatch, (kind, ranks), ranks=ranks, patched="megatron with fakes")


def check_dispatch(kind: str, ranks: int) -> None:
    from megatron.core.transformer.moe import fused_a2a
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from trimtab.integrations.megatron.physical_dispatch import physical_dispatcher, start_rows

    replace_libraries()
    layout, slots, top_k, rank = Layout(ranks=ranks, expert=ranks), 2, 2, dist.get_rank()
    use_layout(layout)
    vars(fused_a2a)["_buffer"] = None
    homes, local = 8 // ranks, 8 // ranks + slots
    # Experts of which tokens of rank r get two each.
    experts = np.arange(ranks * local)
    if kind == "slots":
        experts = experts[experts % local >= homes]
    elif kind != "all":
        experts = experts[local : local + (2 if kind == "one expert" else local)]
    rng = np.random.default_rng(rank)
    ids = torch.from_numpy(np.stack([rng.permutation(experts)[:top_k] for _ in range(5 + 3 * rank)]))
    sent = np.bincount(ids.view(-1), minlength=ranks * local).reshape(ranks, local)
    arriving = np.stack(of_all_ranks(sent))[:, rank]
    groups = [SimpleNamespace(counts=part.tolist()) for part in np.split(arriving.sum(axis=0), [homes])]
    call: Any = SimpleNamespace(is_live=False, replicas=SimpleNamespace(count=1))
    call.layout = SimpleNamespace(
        physical_ids=ids.to(torch.uint16), arrivals=[None, Arrivals.of(arriving)], home_groups=groups[0],
        replica_groups=groups[1],
        send_splits=sent.sum(axis=1).tolist(), recv_splits=arriving.sum(axis=1).tolist(),
    )  # fmt: skip
    results = []
    for flex in ("deepep", None):
        layer = next(Model(layout, MegatronCase(flex=flex)).moe_layers())
        physical = physical_dispatcher(layer, slots, get_default_pg_collection())
        assert physical.local_expert_indices == [*range(local * rank, local * (rank + 1))]
        torch.manual_seed(rank)
        hidden = torch.randn(len(ids), 1, 16, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(len(ids), top_k, requires_grad=True)
        sent_hidden, probs = start_rows(physical, hidden, weights, call)
        arrived, counts, probs = physical.dispatch_postprocess(*physical.token_dispatch(sent_hidden, probs))
        assert counts.tolist() == arriving.sum(axis=0).tolist()
        factors = torch.repeat_interleave(torch.arange(local) + 1 + local * rank, counts)
        outputs = physical.combine_preprocess(arrived.sin() * (factors * probs)[:, None])
        outputs = physical.combine_postprocess(physical.token_combine(outputs))
        (outputs * torch.randn_like(outputs)).sum().backward()
        assert hidden.grad is not None
        assert weights.grad is not None
        results.append([outputs.detach(), hidden.grad, weights.grad.double()])
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    # Without any row of its own a rank waits.
    assert fused_a2a._buffer.waited == (set() if arriving.any() else {local})
    # Nor does it wait later, also not in backward.
    assert fake_deep_ep.Buffer.read == 0


def test_signatures_are_those_of_deepep() -> None:
    folder = os.environ.get("DEEP_EP", "")
    if not folder:
        pytest.skip("needs the source of deepseek-ai/DeepEP dd758ca: DEEP_EP=folder")
    for name in ("get_dispatch_layout", "dispatch", "combine"):
        parameters = [*inspect.signature(getattr(fake_deep_ep.Buffer, name)).parameters]
        assert parameters_in(folder, f"deep_ep.buffers.legacy:Buffer.{name}") == parameters


@pytest.mark.parametrize("name", ["deepep", "grouped"])
@runs_on_ranks()
def test_plans_price_what_the_dispatcher_sends(state: State, name: str) -> None:
    from trimtab.integrations.megatron import balance

    model = Model(FAKES_LAYOUT, CASES[name])
    session = balance(model.chunks).session
    assert session is not None
    assert {homes.dispatch_forwards for homes in session.homes} == {name == "deepep"}


@runs_on_ranks()
def test_refuses_by_name(state: State) -> None:
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    from trimtab.integrations.megatron import balance

    def refused(message: str, case: MegatronCase, change: Callable[[Any], None], slots: int = 2) -> None:
        model = Model(FAKES_LAYOUT, case)
        change(next(model.moe_layers()))
        with pytest.raises(InputError, match=message):
            balance(model.chunks, slots_per_rank=slots)

    deepep, grouped = MegatronCase(flex="deepep"), MegatronCase(grouped=True)
    message = r"moe_flex_dispatcher_backend=ncclep is not supported.*set it to deepep or hybridep"
    refused(message, deepep, lambda layer: vars(layer.config).update(moe_flex_dispatcher_backend="ncclep"))
    message = "has experts in TEGroupedMLP; use SequentialMLP, or TEGroupedMLP with one weight"
    refused(message, grouped, lambda layer: vars(layer.experts).update(_with_fused_impl=True))
    refused(message, grouped, lambda layer: setattr(layer.experts.linear_fc1, "weight0", None))
    other = type("OtherMLP", (TEGroupedMLP,), {})
    refused("has experts in OtherMLP", grouped, lambda layer: setattr(layer.experts, "__class__", other))
