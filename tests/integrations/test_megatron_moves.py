"""Experts of Megatron models move between optimizer steps with all of their state, and leave in logical order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.accelerator import LAZY
from helpers.examples import examples, nightly_except
from helpers.megatron_exporters import bridge_pairs, slime_lists, verl_pairs
from helpers.megatron_moves import (
    BY_POSITION,
    Pair,
    compare_checkpoints,
    save_by_position,
    save_checkpoints,
    save_with_caches,
)
from helpers.megatron_runs import Layout, MegatronCase, Model, use_layout
from helpers.rank_pool import on_ranks
from helpers.rank_tests import runs_on_ranks
from trimtab.cluster import load_cluster
from trimtab.errors import InputError, RanksDisagreeError
from trimtab.planner import Placement, plan_schedule
from trimtab.runtime import step_planner

if TYPE_CHECKING:
    from trimtab.integrations.megatron.logical_order import NamedTensor

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
def test_models_with_moves_train_as_models_without(layout: str, ways: str) -> None:
    cases = examples(short=CASES_OF[layout][: 1 if ways else None], long=CASES + MORE)
    on_megatron(train, LAYOUTS[layout], cases, ranks=LAYOUTS[layout].ranks, ways=ways)


def train(layout: Layout, cases: list[MegatronCase]) -> None:
    """Live steps and planned ones with replicas; experts move before some of them."""
    use_layout(layout)
    for case in cases:
        pair = Pair(layout, case)
        pair.train(STEPS)
        pair.gather_parameters()
        pair.check_export(1e-12 if case.double else 2e-2 if case.bf16 else 1e-5)
        has_experts = pair.session.session is not None
        assert pair.moved > 0 or not has_experts
        assert pair.replicas > 0 or not has_experts
        error = pair.difference()
        # Sums over a token's experts follow the order of ranks and rows.
        assert error < (1e-11 if case.double else 2e-2 if case.bf16 else 1e-5), (case, error)
        pair.session.remove()


@pytest.mark.longer
@pytest.mark.parametrize(
    "saved",
    nightly_except(["EP 2, Adam", *examples(short=["PP 2 x EP 2"], long=list(LAYOUTS))], "EP 2, Adam"),
)
def test_checkpoints_are_those_of_models_without_moves(saved: str, tmp_path: Path) -> None:
    """Megatron without Trimtab loads them, on other ranks and stages too; with plain Adam on the same only."""
    layout = LAYOUTS[saved.removesuffix(", Adam")]
    case = MegatronCase(distributed_optimizer="Adam" not in saved, adam=True, pipelined_layers=True)
    on_megatron(save_checkpoints, layout, case, str(tmp_path), 2, ranks=layout.ranks)
    others = [Layout(2, 2), Layout(4, 2), Layout(4, 4), Layout(4, 2, pipeline=2), Layout(4, 1, pipeline=2)]
    loaded = [layout] if "Adam" in saved else examples(short=[Layout(4, 4)], long=others)
    for each in loaded:
        on_megatron(compare_checkpoints, each, case, str(tmp_path), ranks=each.ranks)


@pytest.mark.parametrize("layout", examples(short=["EP 2 x expert-DP 2"], long=list(LAYOUTS)))
def test_checkpoints_by_position_bring_experts_home(layout: str, tmp_path: Path) -> None:
    case, ranks = MegatronCase(distributed_optimizer=True), LAYOUTS[layout].ranks
    on_megatron(save_by_position, LAYOUTS[layout], case, str(tmp_path), ranks=ranks)
    on_megatron(compare_checkpoints, LAYOUTS[layout], case, str(tmp_path), BY_POSITION, ranks=ranks)


@pytest.mark.parametrize("layout", examples(short=["EP 2 x expert-DP 2"], long=list(LAYOUTS)))
@pytest.mark.parametrize("keeps_plan", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_checkpoints_that_assume_a_constant_structure_have_moved_experts(
    layout: str, keeps_plan: bool, tmp_path: Path
) -> None:
    """Megatron keeps which rank saves what, and the plan of the files; shards that have moved would be missing."""
    case, ranks = MegatronCase(distributed_optimizer=True), LAYOUTS[layout].ranks
    on_megatron(save_with_caches, LAYOUTS[layout], case, str(tmp_path), keeps_plan, ranks=ranks)
    on_megatron(compare_checkpoints, LAYOUTS[layout], case, str(tmp_path), ranks=ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exports_are_those_of_models_without_moves(layout: str) -> None:
    on_megatron(export, LAYOUTS[layout], ranks=LAYOUTS[layout].ranks)


def export(layout: Layout) -> None:
    """The exporters of verl, slime and Megatron-Bridge, around a model whose experts are away."""
    use_layout(layout)
    pair = Pair(layout, MegatronCase(grouped=True, balanced_routers=True))
    session = pair.session
    pair.move(everywhere=True)
    exporters: dict[str, Callable[[Model], Iterator[NamedTensor]]] = {
        "verl": verl_pairs,
        "Megatron-Bridge": partial(bridge_pairs, grouped=False),
        "Megatron-Bridge, grouped": partial(bridge_pairs, grouped=True),
    }
    for name, exporter in exporters.items():
        check_equal(name, exporter(pair.plain), session.logical_names(exporter(pair.moving)))
        # The test can fail: most experts are elsewhere.
        with session.weight_sync():
            positional, plain = dict(exporter(pair.moving)), dict(exporter(pair.plain))
        assert any(not torch.equal(value, plain[key]) for key, value in positional.items())
    # Stages have different numbers of lists, and most ranks have none.
    plain_pairs = [named for each in slime_lists(pair.plain) for named in each]
    with session.weight_sync() as rename:
        check_equal("slime", plain_pairs, [named for each in slime_lists(pair.moving) for named in rename(each)])
    if session.have_moved:
        begun = session.logical_names(bridge_pairs(pair.moving, grouped=False))
        next(begun)
        with session.weight_sync() as rename:
            before = list(bridge_pairs(pair.moving, grouped=False))
        session.return_home()
        for late in (begun, rename(before)):
            with pytest.raises(RuntimeError, match="experts have moved since this weight sync began"):
                next(late)
    else:
        session.return_home()
    session.remove()


def check_equal(what: str, expected: Iterable[NamedTensor], actual: Iterable[NamedTensor]) -> None:
    expected_by_name, actual_by_name = dict(expected), dict(actual)
    assert expected_by_name.keys() == actual_by_name.keys(), what
    assert all(torch.equal(value, actual_by_name[name]) for name, value in expected_by_name.items()), what


@pytest.mark.parametrize("is_distributed", [False, True])
@runs_on_ranks(2, "megatron")
def test_plans_move_experts_unless_any_rank_has_gradients_that_no_optimizer_has_used(is_distributed: bool) -> None:
    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(adam=True, distributed_optimizer=is_distributed))
    model, tokens_MBS = pair.moving, pair.tokens()
    routing = model.record(pair.function, tokens_MBS)

    def may_move() -> bool:
        asked: list[Any] = []

        def plan(*args: Any, may_move: bool, **options: Any) -> Any:
            asked.append(may_move)
            return plan_schedule(*args, may_move=False, **options)

        with mock.patch.object(step_planner, "plan_schedule", plan):
            pair.session.plan(routing, len(tokens_MBS))
        dist.broadcast_object_list(asked := asked or [None])
        return bool(asked[0])

    model.zero()
    assert may_move()
    # A forward alone adds nothing.
    model.run(pair.function, tokens_MBS, forward_only=True)
    assert may_move()
    # Gradients are accumulated over several plans.
    for _ in range(2):
        model.run(pair.session.planned(pair.function, routing), tokens_MBS)
        assert not may_move()
    parts = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    fails = mock.patch.object(parts[-1], "prepare_grads", side_effect=ValueError("in a step"))
    with fails, pytest.raises(ValueError, match="in a step"):
        model.optimizer.step()
    assert not may_move()
    model.optimizer.step()
    assert may_move()
    model.run(pair.function, tokens_MBS)
    assert not may_move()
    model.zero()
    assert may_move()

    def failing(forward_step_func: Any, **others: Any) -> None:
        pair.function(forward_step_func=forward_step_func, **others)
        raise ValueError("after a backward")

    with pytest.raises(ValueError, match="after a backward"):
        model.run(pair.session.planned(failing, routing), tokens_MBS)
    assert not may_move()
    # The planning rank dropped its own.
    if dist.get_rank() == 0:
        model.zero()
    assert not may_move()
    with pytest.raises(RuntimeError, match="gradients that wait for an optimizer step"):
        pair.move(everywhere=True)
    model.zero()
    assert may_move()
    pair.move(everywhere=True)
    assert pair.session.have_moved
    pair.session.remove()


@pytest.mark.parametrize("is_distributed", [False, True])
@runs_on_ranks(2, "megatron")
def test_experts_stay_if_their_optimizers_have_made_different_numbers_of_steps(is_distributed: bool) -> None:
    from trimtab.integrations.megatron.optimizer_state import optimizers_in

    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(distributed_optimizer=is_distributed, adam=True))
    pair.zero()
    pair.live_step(pair.tokens())
    pair.moving.optimizer.step()
    states = [state for each in optimizers_in(pair.moving.optimizer) for state in each.optimizer.state.values()]
    for state in states:
        state["step"] += dist.get_rank()
    with pytest.raises((InputError, RanksDisagreeError), match=r"optimizer.* state of .*step"):
        pair.move(everywhere=True)
    assert not pair.session.have_moved
    for state in states:
        state["step"] -= dist.get_rank()
    pair.move(everywhere=True)
    assert pair.session.have_moved
    pair.session.remove()


@runs_on_ranks(2, "megatron")
def test_a_reference_that_is_swapped_in_by_position_is_refused_while_experts_are_away() -> None:
    """Frameworks load a reference's weights into the same Parameters, and run passes without plans."""
    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(adam=True))
    tokens_MBS = pair.tokens()
    reference = [parameter.detach().clone() for chunk in pair.moving.chunks for parameter in chunk.parameters()]
    pair.train(2)
    pair.move(everywhere=True)
    assert pair.session.have_moved
    with torch.no_grad():
        expected = pair.moving.run(pair.function, tokens_MBS, forward_only=True)
        mine = [parameter.detach().clone() for chunk in pair.moving.chunks for parameter in chunk.parameters()]

        def load(values: list[torch.Tensor]) -> None:
            parameters = [parameter for chunk in pair.moving.chunks for parameter in chunk.parameters()]
            for parameter, value in zip(parameters, values, strict=True):
                parameter.data.copy_(value)

        load(reference)
        with pytest.raises(RuntimeError, match=r"were replaced while .* enter session.first_homes\(\)"):
            pair.moving.run(pair.function, tokens_MBS, forward_only=True)
        load(mine)
        assert pair.moving.run(pair.function, tokens_MBS, forward_only=True) == expected
    pair.session.remove()


@runs_on_ranks(2, "megatron")
def test_rehome_moves_experts_and_makes_no_replicas() -> None:
    """Three experts of rank 0 have all tokens; with one of them on rank 1 the step takes less time."""
    from trimtab.integrations.megatron import balance

    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(adam=True), mode="rehome", rates=load_cluster("h100x8", ranks=2))
    tokens_MBS = pair.tokens()
    ids = np.resize(np.array([[0, 1], [1, 2], [2, 0]]), (len(tokens_MBS[0]), 2))
    routing = [np.stack([ids] * 2, axis=1) for _ in tokens_MBS]
    pair.zero()
    with mock.patch.object(step_planner, "plan_schedule", wraps=plan_schedule) as planner:
        pair.moving.run(pair.session.planned(pair.function, routing), tokens_MBS)
    # The first rank plans.
    assert [call.args[3].slots_per_rank for call in planner.call_args_list] == [0] * (dist.get_rank() == 0)
    report = pair.session.report
    assert report is not None
    assert report.replicas == 0 < report.homes_moved
    assert report.max_vio_before == 1.0
    assert report.max_vio_after == pytest.approx(1 / 3, abs=0.05)
    pair.zero()
    pair.session.remove()
    without_optimizer = balance(pair.moving.chunks, mode="rehome")
    with pytest.raises(InputError, match="state of their optimizers; register these first"):
        without_optimizer.plan(routing, len(routing))
    without_optimizer.remove()


@runs_on_ranks(2, "megatron")
def test_ranks_that_are_given_different_homes_raise() -> None:
    """Also if one of them is given the present ones, and if no optimizer is registered."""
    from trimtab.integrations.megatron import balance

    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(adam=True))
    session = pair.session.session
    assert session is not None
    homes = session.placement.home
    others = homes if dist.get_rank() else homes[:, ::-1].copy()
    with pytest.raises(RanksDisagreeError, match="homes"):
        pair.session.move(Placement(others))
    pair.session.remove()
    without_optimizer = balance(pair.moving.chunks)
    with pytest.raises(InputError, match="register_optimizer"):
        without_optimizer.move(Placement(others))
    without_optimizer.remove()


@runs_on_ranks(2, "megatron")
def test_a_session_without_moves_is_removed_amid_a_failed_step() -> None:
    """No rank waits for another; the model is then Megatron's again."""
    use_layout(EP_2)
    pair = Pair(EP_2, MegatronCase(adam=True, double=True))
    tokens_MBS = pair.tokens()
    routing = pair.plain.record(pair.function, tokens_MBS)
    layer = next(iter(pair.moving.moe_layers()))

    def fail(*_args: Any) -> None:
        raise OSError("the test's")

    pair.zero()
    hook = layer.router.register_forward_hook(fail)
    with pytest.raises(OSError, match="the test's"):
        pair.moving.run(pair.session.planned(pair.function, routing), tokens_MBS)
    hook.remove()
    if dist.get_rank():
        pair.session.remove()
    dist.barrier()
    pair.session.remove()
    pair.zero()
    pair.live_step(tokens_MBS)
    for model in (pair.plain, pair.moving):
        model.optimizer.step()
    assert pair.difference() < 1e-12
