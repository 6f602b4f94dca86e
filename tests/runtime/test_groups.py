"""Sessions on process groups of a framework: of any ranks, in any order, with nodes in any order."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.comparison_cases import MODEL
from helpers.moe_model import Shape
from helpers.planned_steps import Step, make
from helpers.rank_pool import RankPool, on_ranks, shared_pool
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from trimtab import ClusterSpec, Placement, RoutingTrace
from trimtab.cluster import StepCosts
from trimtab.errors import InputError, RanksDisagreeError
from trimtab.planner import PlanSettings, Schedule
from trimtab.runtime import Session, step_planner
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.step_planner import SessionPlanner

State = dict[str, Any]
Ranks = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = shared_pool(4)
    yield pool
    pool.forget()


def groups_of(state: State, ranks: Ranks) -> dist.ProcessGroup:
    """This rank's group, of the groups that all ranks create in this order."""
    if repr(ranks) not in state:
        made = [dist.new_group(list(each), sort_ranks=False) for each in ranks]
        state[repr(ranks)] = next(group for group, each in zip(made, ranks, strict=True) if dist.get_rank() in each)
    return state[repr(ranks)]


def places(state: State, expert_ranks: Ranks, dp_ranks: Ranks | None, nodes: list[int] | None) -> dict[str, Any]:
    """This rank's numbers in a session, and the orders of its groups."""
    dp_group = groups_of(state, dp_ranks) if dp_ranks else None
    session = Session(num_experts=8, expert_group=groups_of(state, expert_ranks), expert_dp_group=dp_group, nodes=nodes)
    topology = session.topology
    total = torch.tensor([float(1 << dist.get_rank())])
    dist.all_reduce(total, group=topology.data)
    names = "experts weights gradients control expert_control node_control planning planning_data"
    return {
        **{name: dist.get_process_group_ranks(getattr(topology, name)) for name in names.split()},
        **{name: getattr(topology, name) for name in ("rank", "group", "groups", "data_rank", "ranks_per_node")},
        "leaders": topology.leaders and dist.get_process_group_ranks(topology.leaders),
        "home_experts": session.home_experts.tolist(),
        "data": int(total),
        "is_given": topology.experts is groups_of(state, expert_ranks),
        "by_position": topology.ranks_by_position,
    }


# Groups of experts and of data, nodes, and what each rank then has.
PLACES: dict[str, tuple[Ranks, Ranks | None, list[int] | None, dict[str, list[Any]]]] = {
    "groups of ranks that are not neighbours": (((0, 2), (1, 3)), ((0, 1), (2, 3)), None, {
        "group": [0, 1, 0, 1], "rank": [0, 0, 1, 1], "groups": [2] * 4, "data_rank": [0, 2, 1, 3],
        "is_given": [True] * 4, "data": [0b1111] * 4, "leaders": [[0, 1], [0, 1], None, None],
        **dict.fromkeys(("control", "planning_data"), [[0, 2, 1, 3]] * 4),
        **dict.fromkeys(("experts", "weights", "expert_control", "node_control", "planning"), [[0, 2], [1, 3]] * 2),
        "home_experts": [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2,
    }),
    # Ranks are numbered by node; homes at the start follow the framework's group.
    "nodes of ranks that are not neighbours": (((0, 1, 2, 3),), None, [7, 5, 7, 5], {
        "rank": [0, 2, 1, 3], "ranks_per_node": [2] * 4, "is_given": [False] * 4,
        **dict.fromkeys(("experts", "weights", "gradients", "control", "expert_control"), [[0, 2, 1, 3]] * 4),
        "node_control": [[0, 2], [1, 3]] * 2, "home_experts": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "by_position": [[0, 1, 2, 3]] * 4,
    }),
    "a group in another order than the ranks": (((3, 2, 1, 0),), None, [0, 1, 1, 0], {
        "rank": [1, 3, 2, 0], "experts": [[3, 0, 2, 1]] * 4, "control": [[3, 0, 2, 1]] * 4,
        "node_control": [[3, 0], [2, 1], [2, 1], [3, 0]], "home_experts": [[6, 7], [4, 5], [2, 3], [0, 1]],
        "by_position": [[3, 2, 1, 0]] * 4,
    }),
    "the same on one node": (((3, 2, 1, 0),), None, None, {"rank": [3, 2, 1, 0], "is_given": [True] * 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_places_of_ranks(pool: RankPool, name: str) -> None:
    *arguments, expected = PLACES[name]
    found = pool.call(places, *arguments)
    assert {key: [place[key] for place in found] for key in expected} == expected


def test_nodes_may_be_omitted_for_one_node(pool: RankPool) -> None:
    assert pool.call(places, ((0, 1, 2, 3),), None, [4] * 4) == pool.call(places, ((0, 1, 2, 3),), None, None)


SHAPE = Shape(layers=2, experts=4, top_k=2, hidden=8, width=6)


def train_stage(state: State, stages: Ranks, chosen: int) -> list[float] | None:
    """Sums of all weights after each of three planned steps on the ranks of a pipeline stage, while others are idle."""
    group = groups_of(state, stages)
    if dist.get_rank() not in stages[chosen]:
        return None
    # Ranks may have created different numbers of groups.
    if dist.get_rank() == stages[chosen][0]:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    session, model, _ = make(torch.float64, shape=SHAPE, expert_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.register_optimizers(optimizer)
    rng, sums = np.random.default_rng(session.rank), []
    for _ in range(3):
        session.plan_micro_steps([np.argsort(rng.random((9, 2, 4)), axis=-1)[:, :, :2] for _ in range(2)])
        for index in range(2):
            with session.micro_step(index):
                model(torch.from_numpy(rng.integers(0, SHAPE.vocab, 9))).square().mean().backward()
        session.finish_gradients(model.replicated())
        optimizer.step()
        optimizer.zero_grad()
        sums.append(float(sum(value.sum() for value in session.whole_state_dict(model).values())))
    return sums


def test_pipeline_stages_create_sessions_independently(pool: RankPool) -> None:
    """No stage waits for the other, also if its ranks were in other sessions and groups before."""
    second = pool.call(train_stage, ((0, 1), (2, 3)), 1)
    assert second[:2] == [None, None]
    assert second[2] is not None
    assert len({*second[2]}) == 3
    first = pool.call(train_stage, ((0, 1), (2, 3)), 0)
    assert first == [*second[2:], None, None]
    assert pool.call(train_stage, ((1, 0), (2, 3)), 0) == first


def disagree(state: State) -> str:
    """The error of a session of scattered ranks that make different calls."""
    group = groups_of(state, ((0, 2), (3, 1)))
    session = Session(num_experts=2, expert_group=group, timeout=timedelta(minutes=2))
    try:
        if dist.get_rank() == 3:
            session.finish_gradients()
        else:
            session.whole_state_dict(torch.nn.Linear(1, 1))
    except RanksDisagreeError as error:
        return str(error)
    return ""


def test_errors_name_global_ranks(pool: RankPool) -> None:
    found = pool.call(disagree)
    assert found[0] == found[2] == ""
    assert found[1] == found[3]
    assert "rank 3 called finish_gradients() where rank 1 called whole_state_dict()" in found[1]


def refused(state: State, expert_ranks: Ranks, dp_ranks: Ranks | None, nodes: list[Any] | None) -> str:
    try:
        places(state, expert_ranks, dp_ranks, nodes[dist.get_rank()] if nodes else None)
    except InputError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("expert_ranks", "dp_ranks", "nodes", "message"),
    [
        (((0, 1, 2, 3),), None, [[0, 0, 0, 1]] * 4, "equally many ranks of expert_group; nodes has 3 on node 0, 1 on"),
        (((0, 1, 2, 3),), None, [[0, 1]] * 4, "nodes has 2 node numbers; expert_group has 4 ranks"),
        (((0, 1, 2, 3),), None, [["a", 0, 1, 1]] * 4, "it should be the node number of every rank"),
        (((0, 1, 2, 3),), None, [None, None, [0, 0, 1], None], "nodes has 3 node numbers"),
        (((0, 1, 2, 3),), None, [None, None, None, [0, 1, 0, 1]], "the same layout in all expert-parallel groups"),
        (((0, 2), (1, 3)), ((0, 1), (2, 3)), [[0, 1], [0, 0]] * 2, "nodes should have the same layout"),
        (((0, 2), (1, 3)), ((0, 1), (2, 3)), [[0, 1], [0]] * 2, "nodes has 1 node numbers"),
        (((0, 1), (2, 3)), ((0, 1), (2, 3)), None, "don't line up"),
        # The second group has the opposite order.
        (((0, 2), (1, 3)), ((0, 3), (1, 2)), None, "don't line up"),
        (((0, 2), (3, 1)), ((0, 1), (2, 3)), None, "[0, 2], [3, 1], expert-data-parallel groups [0, 1], [2, 3]"),
        # Ranks have different numbers of their group.
        (((0, 2), (1, 3)), ((0, 1), (3, 2)), None, "don't line up"),
        (((0, 1), (2, 3)), ((0, 2), (1,), (3,)), None, "don't line up"),
        (((0, 1, 2), (3,)), ((0, 3), (1,), (2,)), None, "don't line up"),
    ],
)
def test_inconsistent_groups_and_nodes(
    pool: RankPool, expert_ranks: Ranks, dp_ranks: Ranks | None, nodes: list[Any] | None, message: str
) -> None:
    """All ranks raise within seconds."""
    found = pool.call(refused, expert_ranks, dp_ranks, nodes)
    assert "accepted" not in found, found
    assert message in found[0], found


@runs_on_ranks()
def test_both_kinds_of_arguments(state: State) -> None:
    whole = groups_of(state, ((0, 1, 2, 3),))
    own: tuple[dict[str, Any], ...] = ({"group": whole}, {"groups": 2}, {"ranks_per_node": 2})
    frameworks: tuple[dict[str, Any], ...] = ({"expert_dp_group": whole}, {"nodes": [0, 0, 1, 1]})
    for arguments in own:
        with pytest.raises(InputError, match="use expert_dp_group for several expert-parallel groups and nodes"):
            Session(num_experts=4, expert_group=whole, **arguments)
    for arguments in frameworks:
        with pytest.raises(InputError, match="go with expert_group; for groups that the session creates, use groups"):
            Session(num_experts=4, **arguments)


@pytest.mark.parametrize("name", ["expert_group", "expert_dp_group", "group"])
@runs_on_ranks()
def test_groups_of_other_ranks(state: State, name: str) -> None:
    """Ranks 0 and 2 pass a group of ranks 1 and 3."""
    given: dict[str, Any] = {"expert_group": groups_of(state, ((0, 2), (1, 3)))} if name == "expert_dp_group" else {}
    pair, rank = dist.new_group([1, 3]), dist.get_rank()
    if rank in (0, 2):
        with pytest.raises(InputError, match=f"^{name} is not a process group of rank {rank}"):
            Session(num_experts=4, **given, **{name: pair})


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", [InputError, ValueError])
@runs_on_ranks()
def test_an_error_of_one_groups_planner_is_raised_in_all_groups(
    state: State, failing: int, kind: type[Exception]
) -> None:
    """Groups {0, 1} and {2, 3}: the first rank of one fails while it plans, and then the step is planned."""
    session, _, _ = make(groups=2, timeout=timedelta(minutes=2))
    step = Step(7)
    mine = step.trace.select(step.schedule.sequences_of(dist.get_rank()))
    leader = 2 * failing

    def fail(*_: object, **__: object) -> None:
        raise kind("no such plan")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == leader:
            patch.setattr(step_planner, "plan_schedule", fail)
        with pytest.raises((InputError, RuntimeError, ValueError), match="no such plan") as raised:
            session.plan(mine, step.schedule)
    if kind is InputError:
        assert isinstance(raised.value, InputError)
    elif dist.get_rank() != leader:
        assert f"rank {leader} failed: ValueError" in str(raised.value)
    assert session.plan(mine, step.schedule).replicas >= 0
    homes = of_all_ranks(session.layers[0].home_experts.tolist())
    assert homes[:2] == homes[2:]


def peak_of_planning(groups: int, counts_mb: int) -> tuple[float, float]:
    """Planning a step on groups of one rank: this rank's number, and its peak of memory in sizes of its counts."""
    topology = Topology.build(None, groups, None)
    rng = np.random.default_rng(dist.get_rank())
    shape = 2 * counts_mb, 4, 32768  # micro-steps, layers and experts, int32
    ids = rng.integers(0, shape[2], (shape[0], shape[1], 1)).astype(np.uint16)
    trace = RoutingTrace.from_sequences([row[None] for row in ids], num_experts=shape[2])
    sequences = groups * shape[0]
    schedule = Schedule(
        (np.arange(sequences) % shape[0]).astype(np.int32), (np.arange(sequences) // shape[0]).astype(np.int32),
        np.zeros(shape[0], np.int32), groups,
    )  # fmt: skip
    cluster = ClusterSpec(1, 1, 0)
    placement = Placement.contiguous(shape[1], shape[2], 1)
    planner = SessionPlanner(
        topology, cluster, placement, StepCosts.of(cluster, MODEL, moe_layers=4), PlanSettings(), "off"
    )
    # Never stopped: Python 3.11 can crash if another thread allocates while the tracing of memory is stopped.
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    _, load = planner.for_schedule(trace, schedule)
    _, peak = tracemalloc.get_traced_memory()
    assert load.counts_MLE.sum() == shape[0] * shape[1]
    topology.drop_groups()
    return dist.get_rank(), (peak - before) / load.counts_MLE.nbytes


@pytest.mark.nightly
def test_no_rank_s_memory_grows_with_the_number_of_groups() -> None:
    few, many = (
        dict(on_ranks(peak_of_planning, (groups, 4), ranks=groups, patched="memory is traced")) for groups in (2, 16)
    )
    assert max(many.values()) < 1.1 * max(few.values())
