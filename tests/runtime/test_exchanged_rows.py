"""Rows that are exchanged: which are sent and written, their values, bounded rounds, and the measured price."""

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
from helpers.rank_tests import runs_on_ranks
from trimtab.array_type import Array
from trimtab.planner import plan_schedule
from trimtab.runtime import Session, gated_experts, rank_experts
from trimtab.runtime.rank_experts import MovePrice, RankExperts
from trimtab.runtime.state import moving
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.trace.numbering import Numbering

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
        session.add_layer(tensors, gated_experts(), by_expert=[])
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
def watched(session: Session, optimizer: torch.optim.Optimizer | None, order_LE: Array) -> Iterator[list[list[int]]]:
    """Yields the bytes sent to each rank in each exchange. Rows that stay are poisoned during each; at the end they
    must still be."""
    staying = [
        value
        for layer in session.homes
        for row, expert in enumerate(layer.home_experts)
        if order_LE[layer.index, expert] == expert
        for value in rows_of(session, optimizer, layer.index, row)
    ]
    before = [value.clone() for value in staying]
    exchanges: list[list[int]] = []
    exchange = dist.all_to_all_single

    def exchange_and_poison(output: torch.Tensor, rows: torch.Tensor, *splits: Any, **settings: Any) -> None:
        exchange(output, rows, *splits, **settings)
        if splits:  # Not the alignment of ranks before it.
            exchanges.append(splits[1])
            for value in staying:
                value.fill_(POISON)

    with mock.patch.object(dist, "all_to_all_single", exchange_and_poison):
        yield exchanges
    for value, old in zip(staying, before, strict=True):
        assert not exchanges or bool((value == POISON).all()), "a row that stays was written"
        value.copy_(old)


def some_order(session: Session, rng: np.random.Generator, pairs: int | None) -> Array:
    """An order in which random pairs of experts change places, or any order."""
    order_LE = np.tile(np.arange(session.num_experts), (LAYERS, 1))
    if pairs is None:
        return rng.permuted(order_LE, axis=1)
    for layer in rng.integers(0, LAYERS, pairs):
        one, other = rng.permutation(session.num_experts)[:2]
        order_LE[layer, [one, other]] = order_LE[layer, [other, one]]
    return order_LE


def renumber_randomly(kind: str, optimizer: str, dtype: torch.dtype, round_bytes: int, seed: int) -> None:
    session, made = build(kind, optimizer, dtype)
    rng = np.random.default_rng(seed)
    expected = whole(session, made)
    expert_bytes = sum(value.nbytes for value in rows_of(session, made, 0, 0))
    pointers = [value.data_ptr() for layer in range(LAYERS) for value in rows_of(session, made, layer, 0)]
    home_E = session.placement.home[0]
    for pairs in (1, 0, 3, None, 20, 2):
        order_LE = some_order(session, rng, pairs)
        session.take_metrics()
        with mock.patch.object(moving, "ROUND_BYTES", round_bytes), watched(session, made, order_LE) as exchanges:
            session.renumber(order_LE)
        moved_LE = order_LE != np.arange(session.num_experts)
        leaving = int(np.count_nonzero(moved_LE & (home_E == session.rank)))
        assert session.take_metrics()["transfer/moved_bytes"] == leaving * expert_bytes
        # Each tensor starts on a cache line.
        sent, rows = np.array(exchanges, np.int64).reshape(-1, session.num_ranks), leaving * expert_bytes
        padding = 64 * session.num_ranks * LAYERS * len(pointers)
        assert rows <= sent.sum() <= rows + padding * len(sent)
        assert (sent.sum(axis=1) <= round_bytes + padding).all()
        busiest = np.bincount(np.tile(home_E, (LAYERS, 1))[moved_LE], minlength=1).max() * expert_bytes
        # A line of each moving row is sent at once, also if that is more.
        lines = sum(len(value) for value in rows_of(session, made, 0, 0)) * int(moved_LE.any(axis=1).sum())
        assert len(sent) >= min(busiest / round_bytes, lines)
        if busiest <= round_bytes:
            assert len(sent) == bool(moved_LE.any())
        expected = {(layer, e): expected[layer, int(order_LE[layer, e])] for layer, e in expected}
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
            renumber_randomly(*case, seed)


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
        # Small ones do not change it.
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
        if settings["may_move"]:
            used.append(settings["costs"].operations)
        return plan_schedule(*inputs, **settings | {"may_move": False})

    def choose() -> None:
        session.plan(replace(mine, numbering=Numbering()), step.schedule)
        session.renumber()

    with (
        mock.patch("trimtab.runtime.step_planner.plan_schedule", plan),
        mock.patch.object(MovePrice, "measure", autospec=True, side_effect=MovePrice.measure) as measure,
        mock.patch.object(
            MovePrice, "s_per_byte", property(lambda _: 1e-6 if measure.called else None, lambda *_: None)
        ),
    ):
        choose()
        session.renumber([np.arange(session.num_experts)[::-1]] * len(session.layers))
        weights = sum(values.nbytes for values in rows_of(session, None, 0, 0))
        choose()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        choose()
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
    """Each group measures its own exchanges."""
    session, model, _ = make(groups=2)
    session.register_optimizers(torch.optim.SGD(model.parameters()))
    step, used = Step(3), list[float]()
    prices = mock.patch.object(RankExperts, "move_s_per_expert", property(lambda _: 1e-3 * (1 + dist.get_rank())))

    def plan(*inputs: Any, **settings: Any) -> Any:
        used.append(settings["costs"].operations.near_state_s)
        return plan_schedule(*inputs, **settings)

    session.plan(step.trace.select(step.schedule.sequences_of(dist.get_rank())), step.schedule)
    with prices, mock.patch("trimtab.runtime.step_planner.plan_schedule", plan):
        session.renumber()
    assert used == [pytest.approx(2e-3)]


@runs_on_ranks()
def test_copies_of_experts_follow_a_renumbering() -> None:
    """Writes to tensors made in inference mode have no version, so they have to be announced."""
    session = Session(num_experts=2 * dist.get_world_size(), verify_weights=False)
    torch.manual_seed(session.rank)
    with torch.inference_mode():
        tensors = [torch.nn.Parameter(torch.randn(2, *shape), requires_grad=False) for shape in SHAPES]
        # Layers compute on copies in another dtype.
        layer = session.add_layer(tensors, gated_experts(), compute_dtype=torch.bfloat16, by_expert=[])
        torch.manual_seed(7)
        hidden, ids = torch.randn(6, HIDDEN), torch.arange(6)[:, None] % session.num_experts
        outputs = []
        for reverses in (False, True):
            if reverses:
                session.renumber([np.arange(session.num_experts)[::-1]])
                ids = session.num_experts - 1 - ids
            with session.live_micro_step(positions=torch.arange(6)):
                outputs.append(layer(hidden, layer.route(ids), torch.ones(6, 1)))
    assert outputs[0].abs().max() > 0.01
    assert torch.equal(*outputs)
