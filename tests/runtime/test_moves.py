"""Moves of experts: which rows are sent and written, their values, bounded rounds, and the measured price."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.moe_model import ALL_LISTS
from helpers.planned_steps import SHAPE, Step, make
from helpers.random_plans import random_placement
from helpers.rank_tests import runs_on_ranks
from trimtab.array_type import Array
from trimtab.errors import RanksDisagreeError
from trimtab.planner import Placement, plan_schedule
from trimtab.runtime import Session, gated_experts, rank_experts
from trimtab.runtime.rank_experts import MovePrice, RankExperts
from trimtab.runtime.state import moving
from trimtab.runtime.state.home_experts import HomeExperts

LAYERS, HOMES, HIDDEN, WIDTH = 3, 4, 12, 5
# Shapes of one expert's tensors.
SHAPES = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
# The value of rows that stay while others are exchanged.
POISON = -77.0
OPTIMIZERS: dict[str, Any] = {
    "none": None,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}
KINDS = ("stacks", "lists", "both", "strided")


def build(kind: str, optimizer: str, dtype: torch.dtype) -> tuple[Session, torch.optim.Optimizer | None]:
    """A session of random experts, which differ on all ranks, after an optimizer step with random gradients."""
    torch.set_num_threads(1)
    session = Session(num_experts=HOMES * dist.get_world_size())
    torch.manual_seed(session.rank)
    parameters: list[torch.nn.Parameter] = []
    for _ in range(LAYERS):
        tensors: list[Any] = []
        for t, shape in enumerate(SHAPES):
            stack = torch.randn(HOMES, *shape, dtype=dtype)
            if kind == "strided":  # As transformers' transposed experts.
                stack = stack.mT.contiguous().mT
            is_list = kind == "lists" or (kind == "both" and t == 0)
            tensors.append([torch.nn.Parameter(row.clone()) for row in stack] if is_list else torch.nn.Parameter(stack))
            parameters += tensors[-1] if is_list else tensors[-1:]
        # A module that gets them is noted; parameters of none are searched among all objects, for a third of a second.
        torch.nn.ParameterList(parameters)
        session.add_layer(tensors, gated_experts())
    if OPTIMIZERS[optimizer] is None:
        return session, None
    made: torch.optim.Optimizer = OPTIMIZERS[optimizer](parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    made.step()
    made.zero_grad()
    session.register_optimizers(made)
    return session, made


def places_of(layer: HomeExperts, row: int) -> list[tuple[torch.nn.Parameter, Any]]:
    """For each tensor the Parameter that has a row, and the row's index in it."""
    return [(each, row) if isinstance(each, torch.Tensor) else (each[row], ...) for each in layer.tensors]


def rows_of(session: Session, optimizer: torch.optim.Optimizer | None, layer: int, row: int) -> list[torch.Tensor]:
    """Weights and optimizer state of a row, as views."""
    rows = []
    for parameter, index in places_of(session.homes[layer], row):
        state = {} if optimizer is None else optimizer.state[parameter]
        values = [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor) and state[key].ndim]
        rows += [value[index] for value in (parameter.detach(), *values)]
    return rows


Experts = dict[tuple[int, int], list[torch.Tensor]]


def whole(session: Session, optimizer: torch.optim.Optimizer | None) -> Experts:
    """Copies of everything that belongs to each (layer, expert), from all ranks."""
    mine = {
        (layer.index, int(expert)): [value.clone() for value in rows_of(session, optimizer, layer.index, row)]
        for layer in session.homes
        for row, expert in enumerate(layer.home_experts)
    }
    gathered: list[Any] = [None] * session.num_ranks
    dist.all_gather_object(gathered, mine)
    return {place: values for of_rank in gathered for place, values in of_rank.items()}


def assert_same(actual: Experts, expected: Experts) -> None:
    assert actual.keys() == expected.keys()
    for place, values in expected.items():
        assert all(map(torch.equal, actual[place], values)), place


@contextmanager
def watched(session: Session, optimizer: torch.optim.Optimizer | None, home_LE: Array) -> Iterator[list[list[int]]]:
    """Yields the bytes sent to each rank in each exchange of a move. Rows that stay are poisoned during each exchange;
    at the end they must still be."""
    staying = [
        value
        for layer in session.homes
        for rows_E in [layer.places_after(home_LE[layer.index]).rows_E]
        for row, expert in enumerate(layer.home_experts)
        # Rows on a rank change only if all experts return to their first homes.
        if home_LE[layer.index, expert] == session.rank and rows_E[expert] == row
        for value in rows_of(session, optimizer, layer.index, row)
    ]
    before = [value.clone() for value in staying]
    exchanges: list[list[int]] = []
    exchange = dist.all_to_all_single

    def exchange_and_poison(output: torch.Tensor, rows: torch.Tensor, *splits: Any, **settings: Any) -> None:
        exchange(output, rows, *splits, **settings)
        if splits:  # Not the alignment of ranks before a move.
            exchanges.append(splits[1])
            for value in staying:
                value.fill_(POISON)

    with mock.patch.object(dist, "all_to_all_single", exchange_and_poison):
        yield exchanges
    for value, old in zip(staying, before, strict=True):
        assert not exchanges or bool((value == POISON).all()), "a row that stays was written"
        value.copy_(old)


def swapped(home_LE: Array, rng: np.random.Generator, pairs: int) -> Array:
    """Homes after swaps of random experts."""
    home_LE = home_LE.copy()
    for layer in rng.integers(0, len(home_LE), pairs):
        one, other = rng.permutation(home_LE.shape[1])[:2]
        home_LE[layer, [one, other]] = home_LE[layer, [other, one]]
    return home_LE


def move_randomly(kind: str, optimizer: str, dtype: torch.dtype, round_bytes: int, seed: int) -> None:
    session, made = build(kind, optimizer, dtype)
    rng = np.random.default_rng(seed)
    expected = whole(session, made)
    expert_bytes = sum(value.nbytes for value in rows_of(session, made, 0, 0))
    pointers = [value.data_ptr() for layer in range(LAYERS) for value in rows_of(session, made, layer, 0)]
    for pairs in (1, 0, 3, -1, 20, 2):
        old_LE = session.placement.home
        home_LE = swapped(old_LE, rng, max(0, pairs))
        if pairs < 0:
            home_LE = random_placement(rng, LAYERS, session.num_experts, session.num_ranks).home
        rows_LE = np.stack([layer.rows_E for layer in session.homes])
        session.take_metrics()
        with mock.patch.object(moving, "ROUND_BYTES", round_bytes), watched(session, made, home_LE) as exchanges:
            session.move(Placement(home_LE))

        after_LE = np.stack([layer.rows_E for layer in session.homes])
        # Rows of experts that stay on their rank change only where all are at their first homes.
        first_E = session.topology.initial_placement(1, session.num_experts).home[0]
        stayed_LE = (home_LE == old_LE) & (home_LE != first_E).any(axis=1, keepdims=True)
        assert np.array_equal(after_LE[stayed_LE], rows_LE[stayed_LE])
        moved_LE = (home_LE != old_LE) | (after_LE != rows_LE)
        for layer in session.homes:
            assert np.array_equal(layer.rows_E[layer.home_experts], np.arange(HOMES))
            assert set(layer.home_experts) == set(np.flatnonzero(home_LE[layer.index] == session.rank))
        leaving = int(np.count_nonzero(moved_LE & (old_LE == session.rank)))
        assert session.take_metrics()["transfer/moved_bytes"] == leaving * expert_bytes
        # Each tensor starts on a cache line.
        sent, rows = np.array(exchanges, np.int64).reshape(-1, session.num_ranks), leaving * expert_bytes
        padding = 64 * session.num_ranks * LAYERS * len(pointers)
        assert rows <= sent.sum() <= rows + padding * len(sent)
        assert (sent[:, session.rank] == 0).all() or (moved_LE & (home_LE == old_LE)).any()
        assert (sent.sum(axis=1) <= round_bytes + padding).all()
        busiest = np.bincount(old_LE[moved_LE], minlength=1).max() * expert_bytes
        # A line of each moving row is sent at once, also if that is more.
        lines = sum(len(value) for value in rows_of(session, made, 0, 0)) * int(moved_LE.any(axis=1).sum())
        assert len(sent) >= min(busiest / round_bytes, lines)
        if busiest <= round_bytes:
            assert len(sent) == bool(moved_LE.any())

        assert_same(whole(session, made), expected)
    assert pointers == [value.data_ptr() for layer in range(LAYERS) for value in rows_of(session, made, layer, 0)]


CASES = [
    (kind, optimizer, dtype, round_bytes)
    for kind, optimizer, dtype in zip(
        KINDS * 3, [*OPTIMIZERS] * 4, [torch.float32, torch.bfloat16, torch.float64] * 4, strict=True
    )
    for round_bytes in (moving.ROUND_BYTES, 1000)
] + [("both", "none", torch.float32, 1)]


@pytest.mark.parametrize("kind", KINDS)
@runs_on_ranks()
def test_only_rows_that_move_are_sent_and_written(kind: str) -> None:
    for seed, case in enumerate(CASES):
        if case[0] == kind:
            move_randomly(*case, seed)


@runs_on_ranks(4)
def test_groups_with_other_rows_are_refused() -> None:
    """Two groups come to the same homes by different moves."""
    session = Session(num_experts=4, groups=2)
    session.add_layer([torch.nn.Parameter(torch.randn(2, *shape)) for shape in SHAPES], gated_experts())
    stops = [Placement(np.array([home], np.int16)) for home in ([0, 1, 0, 1], [1, 1, 0, 0])]
    session.finish_gradients()
    for placement in stops[session.topology.group :]:
        session.move(placement)
    with pytest.raises(RanksDisagreeError, match="homes and rows of experts"):
        session.finish_gradients()


@runs_on_ranks()
def test_norm_does_not_depend_on_the_order_of_rows() -> None:
    """Norms at the same homes, after different moves."""
    for seed in range(12):
        norms = set()
        for direct in (True, False):
            session, _ = build(KINDS[seed % 3], "none", torch.float64)
            rng = np.random.default_rng(seed)
            other, last = (random_placement(rng, LAYERS, session.num_experts, session.num_ranks) for _ in range(2))
            for placement in (last,) if direct else (other, last):
                session.move(placement)
            for layer in session.homes:
                for parameter in layer.parameters:
                    parameter.grad = torch.empty_like(parameter)
                for row, expert in enumerate(layer.home_experts):
                    generator = torch.Generator().manual_seed(seed * 100 + int(expert))
                    for parameter, index in places_of(layer, row):
                        assert parameter.grad is not None
                        parameter.grad[index].normal_(generator=generator)
            norm_of_ranks: list[Any] = [None] * session.num_ranks
            dist.all_gather_object(norm_of_ranks, session.clip_gradients([], 1e9))
            norms |= {*norm_of_ranks}
        assert len(norms) == 1


@runs_on_ranks()
def test_price_is_that_of_the_slowest_rank_and_of_most_bytes() -> None:
    topology, clock = Session(num_experts=2).topology, {"seconds": 0.0}
    price, align = MovePrice(topology), dist.all_to_all_single
    assert price.s_per_byte is None

    def wait_for_others(*tensors: Any, **settings: Any) -> None:
        clock["seconds"] += 7.0  # Is not part of the move.
        align(*tensors, **settings)

    def measure(sent: int) -> float | None:
        def move() -> Array:
            clock["seconds"] += 0.05 * (1 + topology.rank)
            return np.array([sent, 2 * sent])

        price.measure(move, torch.device("cpu"))
        return price.s_per_byte

    with (
        mock.patch.object(rank_experts, "time", SimpleNamespace(perf_counter=lambda: clock["seconds"])),
        mock.patch.object(dist, "all_to_all_single", wait_for_others),
    ):
        assert measure(50) == pytest.approx(0.1 / 100)
        # Small moves do not change it.
        assert [measure(1000), measure(10)] == pytest.approx([0.1 / 2000] * 2)


@pytest.mark.parametrize("lists", [(), ALL_LISTS])
@runs_on_ranks()
def test_measured_price_reaches_the_planner(lists: tuple[str, ...]) -> None:
    session, model, _ = make(shape=replace(SHAPE, lists=lists))
    optimizer = torch.optim.AdamW(model.parameters())
    session.register_optimizers(optimizer)
    step, used = Step(3), []
    mine = step.trace.select(step.schedule.sequences_of(session.rank))

    def plan(*inputs: Any, **settings: Any) -> Any:
        used.append(settings["costs"].operations)
        return plan_schedule(*inputs, **settings)

    def move(expert: int) -> None:
        home_LE = session.placement.home.copy()
        home_LE[:, [expert, -1]] = home_LE[:, [-1, expert]]
        session.move(Placement(home_LE))

    with (
        mock.patch("trimtab.runtime.step_planner.plan_schedule", plan),
        mock.patch.object(MovePrice, "measure", autospec=True, side_effect=MovePrice.measure) as measure,
        mock.patch.object(MovePrice, "s_per_byte", property(lambda _: 1e-6 if measure.called else None)),
    ):
        session.plan(mine, step.schedule)
        before = session.placement.home[0]
        move(int(np.flatnonzero(before != before[-1])[0]))
        weights = sum(values.nbytes for values in rows_of(session, None, 0, 0))
        session.plan(mine, step.schedule)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        session.plan(mine, step.schedule)
    if session.rank == 0:
        assert len(used) == 3
        first, *others = used
        # Weights alone before the first optimizer step, then with both moments.
        for costs, nbytes in zip(others, (weights, 3 * weights), strict=True):
            assert (costs.near_state_s, costs.far_state_s) == pytest.approx((1e-6 * nbytes,) * 2)
            assert costs == first._replace(near_state_s=costs.near_state_s, far_state_s=costs.far_state_s)
        assert first.near_state_s not in (others[0].near_state_s, others[1].near_state_s)


@runs_on_ranks()
def test_groups_plan_with_one_price() -> None:
    """Each group measures its own moves."""
    session, _, _ = make(groups=2)
    step, used = Step(3), list[float]()
    prices = mock.patch.object(RankExperts, "move_s_per_expert", property(lambda _: 1e-3 * (1 + dist.get_rank())))

    def plan(*inputs: Any, **settings: Any) -> Any:
        used.append(settings["costs"].operations.near_state_s)
        return plan_schedule(*inputs, **settings)

    with prices, mock.patch("trimtab.runtime.step_planner.plan_schedule", plan):
        session.plan(step.trace.select(step.schedule.sequences_of(dist.get_rank())), step.schedule)
    assert used == [pytest.approx(2e-3)]


@runs_on_ranks()
def test_the_plan_of_every_step_may_move_experts_unless_gradients_wait() -> None:
    session, model, _ = make()
    optimizer = torch.optim.SGD(model.parameters())
    session.register_optimizers(optimizer)
    step, allowed = Step(3), []
    mine = step.trace.select(step.schedule.sequences_of(session.rank))

    def plan(*inputs: Any, may_move: bool, **settings: Any) -> Any:
        allowed.append(may_move)
        return plan_schedule(*inputs, may_move=may_move, **settings)

    with mock.patch("trimtab.runtime.step_planner.plan_schedule", plan):
        for _ in range(2):
            optimizer.zero_grad()
            session.plan(mine, step.schedule)
            step.run(session, model)
        session.plan(mine, step.schedule)
        optimizer.zero_grad()
        session.plan(mine, step.schedule)
    if session.rank == 0:
        assert allowed == [True, True, False, True]


@runs_on_ranks()
def test_copies_of_experts_follow_a_move() -> None:
    """Writes to tensors made in inference mode have no version, so a move has to announce them."""
    session = Session(num_experts=2 * dist.get_world_size(), verify_weights=False)
    torch.manual_seed(session.rank)
    with torch.inference_mode():
        tensors = [torch.nn.Parameter(torch.randn(2, *shape), requires_grad=False) for shape in SHAPES]
        # Layers compute on copies in another dtype.
        layer = session.add_layer(tensors, gated_experts(), compute_dtype=torch.bfloat16)
        torch.manual_seed(7)
        hidden, ids = torch.randn(6, HIDDEN), torch.arange(6)[:, None] % session.num_experts
        outputs = []
        for home in (session.placement.home, session.placement.home[:, ::-1].copy()):
            session.move(Placement(home))
            with session.live_micro_step(positions=torch.arange(6)):
                outputs.append(layer(hidden, layer.route(ids), torch.ones(6, 1)))
    assert outputs[0].abs().max() > 0.01
    assert torch.equal(*outputs)
