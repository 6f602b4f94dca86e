"""The order of copies and messages on CUDA, checked on a simulated accelerator: see `helpers.late_device`.

Mutants (`helpers.transfer_mutants`) show that a test fails without a certain wait or barrier. The long form runs more
cases.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from helpers import late_device
from helpers.equality import CHECKPOINTING, Case, compare_cases
from helpers.examples import examples
from helpers.late_device import LateDevice, TransferRaceError
from helpers.live_runs import LiveCase, compare_live
from helpers.rank_pool import on_ranks
from helpers.ring_harness import Harness
from helpers.transfer_mutants import mutated
from trimtab.cluster import ClusterSpec
from trimtab.errors import RankFailedError
from trimtab.launch import launch
from trimtab.planner import Placement, Schedule, StepPlan, Workload
from trimtab.planner.replicas.paths import HOST, PEER
from trimtab.runtime import Session, gated_experts
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.mirror import NodeMirror
from trimtab.runtime.transfer.ring import ReplicaRing
from trimtab.trace import synthesize

RING_TRIALS = examples(short=200, long=2000)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group for the barriers of a ring on one process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def random_experts(rng: np.random.Generator, micro_steps: int, layers: int) -> list[list[list[int]]]:
    """None, one or two experts for every instance."""
    return [[rng.permutation(5)[: rng.integers(0, 3)].tolist() for _ in range(layers)] for _ in range(micro_steps)]


def try_ring(rng: np.random.Generator) -> int:
    """Visit instances in random orders, which the ring often predicts wrongly. Returns the number of copies."""
    layers, micro_steps = int(rng.integers(1, 8)), int(rng.integers(1, 4))
    with late_device.install("late") as device:
        experts_MLP = random_experts(rng, micro_steps, layers)
        harness = Harness(experts_MLP, places=int(rng.integers(2, 5)), late_device=True)
        for _ in range(4):
            if rng.integers(2):
                for micro_step in rng.permutation(micro_steps).tolist():
                    harness.forward(micro_step)
                    harness.backward(micro_step)
            else:
                # Partly without a forward, and not run to the end.
                instances = rng.integers(0, (micro_steps, layers), (rng.integers(1, 16), 2)).tolist()
                harness.begin(instances[0][0])
                for micro_step, layer in instances:
                    harness.visit(micro_step, layer)
            if rng.integers(2):
                # `finish_gradients` and an optimizer step, or the step only.
                if rng.integers(2):
                    harness.ring.drain()
                harness.ring.complete()
                harness.weights += 1
                harness.ring.quiesce()
            if rng.integers(2):
                harness.plan(random_experts(rng, micro_steps, layers))
        return device.copies


def try_ring_often(trials: int) -> int:
    return sum(try_ring(np.random.default_rng(seed)) for seed in range(trials))


@pytest.mark.longer
@pytest.mark.usefixtures("one_rank")
def test_random_visits_of_the_ring() -> None:
    assert try_ring_often(RING_TRIALS) > 10 * RING_TRIALS


RING_MUTANTS = {
    "replicas without wait": "wrong weights",
    "wait on the copying stream": "wrong weights",
    "copies before compute": "begins before compute",
    "eviction without wait": "two transfers write the same memory",
    "place in use": "wrong weights|two transfers write the same memory",
    "drain without wait": "source of a copy changed|two transfers write the same memory",
    "complete without wait": "source of a copy changed|two transfers write the same memory",
}


@pytest.mark.longer
@pytest.mark.parametrize("mutant", RING_MUTANTS)
@pytest.mark.usefixtures("one_rank")
def test_random_visits_find_mutants_of_the_ring(mutant: str) -> None:
    with mutated(mutant), pytest.raises((AssertionError, TransferRaceError), match=RING_MUTANTS[mutant]):
        try_ring_often(RING_TRIALS)


def compare_on_late_device(cases: list[Case], mode: str, peers: bool, mutant: str = "") -> LateDevice:
    with late_device.install(mode, peers=peers) as device, mutated(mutant):
        compare_cases(cases)
    return device


def make_case(seed: int, *, groups: int = 1, timeout: timedelta | None = None) -> Case:
    return Case(
        seed, torch.float64, max_norm=0.05 if seed // 8 % 2 else None, run_block=CHECKPOINTING[seed % 4], steps=3,
        padded=seed // 4 % 2 == 1, groups=groups, timeout=timeout,
    )  # fmt: skip


def compare_in_all_modes(cases: list[Case]) -> None:
    """The cases alternate between modes, with and without peers."""
    ways = [(mode, peers) for mode in late_device.MODES for peers in (False, True)]
    copies = messages = 0
    for number, (mode, peers) in enumerate(ways):
        size = len(cases) // len(ways)
        try:
            device = compare_on_late_device(cases[number * size : (number + 1) * size], mode, peers)
        except Exception as error:
            raise AssertionError(f"in mode {mode}, peers {peers}: {type(error).__name__}: {error}") from error
        copies, messages = copies + device.copies, messages + device.messages
    assert min(copies, messages) > 10 * len(cases)


@pytest.mark.longer
@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (3, 4), (4, 4)])
def test_random_plans_equal_the_single_process(ranks: int, count: int) -> None:
    """Every second case of 4 ranks has two expert-parallel groups."""
    seeds = range(examples(short=count, long=10 * count))
    cases = [make_case(seed, groups=2 if ranks == 4 and seed % 2 else 1) for seed in seeds]
    on_ranks(compare_in_all_modes, (cases,), ranks=ranks)


# How long a session with a mutant waits for messages; the cases, first one in which every mutant fails.
SHORT = timedelta(seconds=4)
MUTANT_SEEDS = (15, *range(2, 15))
MUTANTS = {
    "returns without wait": "gradient|norm",
    "sends without wait": "source of a message changed",
    # gloo closes the connections of a rank whose message timed out.
    "order of rank": "Timed out|Connection closed by peer|AssertionError|RanksDisagreeError",
}


@pytest.mark.long
@pytest.mark.parametrize("mode", late_device.MODES)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_random_plans_find_mutants(mutant: str, mode: str) -> None:
    if mode == "serial" and mutant != "order of rank":
        pytest.skip("messages are complete before they are waited for")
    with pytest.raises(RankFailedError, match=MUTANTS[mutant]):
        launch(compare_with_mutant, (mutant, mode), ranks=2)


def compare_with_mutant(mutant: str, mode: str) -> None:
    compare_on_late_device([make_case(seed, timeout=SHORT) for seed in MUTANT_SEEDS], mode, False, mutant)


def fetch_after_exchange() -> None:
    mutant = "fetch after exchange"
    try:
        compare_on_late_device([make_case(seed) for seed in MUTANT_SEEDS[:2]], "late", False, mutant)
    except Exception as error:
        raise AssertionError(f"in mode late: {error}") from error
    compare_with_mutant(mutant, "serial")


@pytest.mark.long
def test_serial_messages_find_another_order_of_groups() -> None:
    """Messages of two groups that ranks post in opposite orders block each other only if they run one at a time."""
    with pytest.raises(RankFailedError, match=r"RuntimeError: .*Timed out|RanksDisagreeError"):
        launch(fetch_after_exchange, (), ranks=2)


def rewrite_weights(path: int, late: str, mutant: str = "") -> str:
    """Change weights while rank 1 copies an expert of rank 0.

    Args:
        path: of the copy.
        late: "reader" if rank 1 should end its copy after rank 0 has written the new weights, "writer" if rank 0 should
            write them after rank 1 has copied them anew. With the runtime's barriers neither can happen; ranks then go
            on after a moment.

    Returns:
        What happens on rank 1: "new" or "old" weights, or a "race". "new" on rank 0.
    """
    rank, patience_s = dist.get_rank(), 30.0 if mutant else 0.3
    with late_device.install("late", peers=path == PEER), pytest.MonkeyPatch.context() as patch:
        session = session_with_one_replica(path)
        ring, homes = session.transfers.ring, session.homes[0]
        source = ring.mirror.row(0, 0)[0] if ring.peers is None else ring.peers.row(0, 0, 0)[0]
        with torch.no_grad():
            with session.micro_step(0):
                """The copy begins."""
            for parameter in homes.parameters:
                parameter.mul_(2)
        outcomes = []
        drain, stage = ReplicaRing.drain, HomeExperts.stage

        def drain_late(ring: ReplicaRing) -> None:
            deadline = time.monotonic() + patience_s
            while source.max() == 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            try:
                drain(ring)
            except TransferRaceError:
                outcomes.append("race")
                ring._held.clear()

        def stage_late(layer: HomeExperts) -> None:
            if mutant:
                # Rank 1 has read.
                read = dist.irecv(torch.zeros(1), 1)
                assert read is not None
                read.wait(timedelta(seconds=patience_s))
            else:
                time.sleep(patience_s)
            stage(layer)

        if late == "reader" and rank == 1:
            patch.setattr(ReplicaRing, "drain", drain_late)
        if late == "writer" and rank == 0:
            patch.setattr(HomeExperts, "stage", stage_late)
        with torch.no_grad(), mutated(mutant), session.micro_step(0):
            if rank == 1:
                ring.prefetch(0, 0)
                outcomes.append("new" if ring.replicas(0, 0)[0].min() == 2 else "old")
                if mutant and late == "writer":
                    dist.send(torch.zeros(1), 0)
        patch.undo()
        session.close()
    return outcomes[0] if outcomes else "new"


def session_with_one_replica(path: int) -> Session:
    """Rank 1 has a replica of rank 0's only expert, whose weights are 1."""
    session = Session(num_experts=2)
    session.add_layer([torch.nn.Parameter(torch.ones(1, 4, 4))], gated_experts())
    trace = synthesize(num_sequences=2, sequence_length=6, num_layers=1, num_experts=2, top_k=1, zipf=0.0)
    schedule = Schedule(np.zeros(2, np.int32), np.arange(2, dtype=np.int32), np.zeros(1, np.int32), 2)
    workload = Workload.from_trace(trace, schedule)
    plan = StepPlan.from_instances(
        schedule, Placement.contiguous(1, 2, 2), [np.array([[0, 1]])], [np.zeros((1, 2), np.int64)],
        mixed_ML=workload.mixed_ML, cluster=ClusterSpec(2, 2, slots_per_rank=1),
    )  # fmt: skip
    plan = replace(plan, replica_paths=np.full(1, path, np.uint8))
    session.apply_step_plan(plan, trace.select(schedule.sequences_of(session.rank)))
    return session


def compare_rewriting() -> None:
    for path, (late, mutant, fault) in itertools.product(
        (HOST, PEER),
        (("reader", "no barrier before rewriting", "race"), ("writer", "no barrier after rewriting", "old")),
    ):
        assert rewrite_weights(path, late) == "new", (path, late)
        outcome = rewrite_weights(path, late, mutant)
        assert outcome == (fault if dist.get_rank() == 1 else "new"), (path, mutant, outcome)


def test_weights_are_rewritten_between_barriers() -> None:
    """Without a barrier, a copy reads weights that are being rewritten, or old ones."""
    on_ranks(compare_rewriting, (), ranks=2)


def fill_far_mirrors() -> None:
    """Every rank is a node, whose mirror holds the experts of all other ranks."""
    rank, ranks, experts = dist.get_rank(), dist.get_world_size(), 40
    topology = Topology.build(None, 1, ranks_per_node=1)
    for mode in late_device.MODES:
        with late_device.install(mode) as device:
            home_E = np.repeat(np.arange(ranks), experts).astype(np.int16)
            values = [torch.nn.Parameter(torch.rand(experts, *shape) + rank) for shape in ((3, 4), (5,))]
            homes = HomeExperts(0, lambda values=values: values, rank=rank, home_E=home_E)  # type: ignore[misc]
            mirror = NodeMirror(topology, homes.expert_like, homes.device)
            mirror.hold([np.argwhere(home_E[None] != node) for node in range(ranks)])
            for _ in range(2):
                sent = mirror.refresh([homes])
                assert sent == (ranks - 1) * experts * homes.expert_bytes
                gathered = [[torch.empty_like(value.data) for _ in range(ranks)] for value in values]
                for each, value in zip(gathered, values, strict=True):
                    dist.all_gather(each, value.data)
                for expert in np.flatnonzero(home_E != rank).tolist():
                    wanted = [each[expert // experts][expert % experts] for each in gathered]
                    assert all(map(torch.equal, mirror.row(0, expert), wanted)), (mode, expert)
                with torch.no_grad():
                    for value in values:
                        value.add_(1)
            assert device.messages == 2 * 2 * 2 * (ranks - 1) * experts
            mirror.close()


def test_far_mirrors_are_filled_in_rounds() -> None:
    """Each rank has more messages than one batch may have, into one staging buffer."""
    on_ranks(fill_far_mirrors, (), ranks=3)


def grow_mirrors() -> None:
    topology = Topology.build(None, 1, None)
    rank, ranks, experts = dist.get_rank(), dist.get_world_size(), 100
    values = [torch.nn.Parameter(torch.rand(experts, 4, 8) + rank)]
    home_E = np.repeat(np.arange(ranks), experts).astype(np.int16)
    homes = HomeExperts(0, lambda: values, rank=rank, home_E=home_E)
    for most, wanted in ((None, [10, 15, 15, 40, 60]), (45, [10, 15, 15, 40, 45])):
        mirror = NodeMirror(
            topology, homes.expert_like, homes.device, None if most is None else most * homes.expert_bytes
        )
        sizes = []
        for count in (10, 11, 5, 40, 41):
            mirror.hold([np.stack([np.zeros(count, np.int64), np.arange(count)], axis=1)])
            mirror.refresh([homes])
            sizes.append(mirror.nbytes // homes.expert_bytes)
            if rank == 0:
                assert all(torch.equal(mirror.row(0, e)[0], values[0][e]) for e in range(count))
        assert sizes == wanted, sizes
        mirror.close()


def test_mirrors_grow_by_half() -> None:
    """Within the session's limit."""
    on_ranks(grow_mirrors, (), ranks=2)


def send_and_go_on() -> None:
    """Rank 1 has replicas of rank 0's expert. Only when the weights are about to change is the send waited for."""
    with late_device.install("late"):
        session = session_with_one_replica(PEER)
        ring = session.transfers.ring
        with torch.no_grad(), session.micro_step(0):
            ring.prefetch(0, 0)
            ring.replicas(0, 0)
        assert [work.is_completed() for _, work in ring._sends] == [False] * (dist.get_rank() == 0)
        ring.complete()
        assert not ring._sends
        session.close()


def test_compute_does_not_wait_for_its_own_sends() -> None:
    on_ranks(send_and_go_on, (), ranks=2)


WAYS = tuple(itertools.product(late_device.MODES, (True, False)))


def compare_live_on_late_device(cases: list[LiveCase]) -> None:
    """In both modes, with and without peers."""
    copies = messages = 0
    for case, (mode, peers) in zip(cases, itertools.cycle(WAYS), strict=False):
        with late_device.install(mode, peers=peers) as device:
            compare_live([case])
        copies, messages = copies + device.copies, messages + device.messages
    assert min(copies, messages) > 0


@pytest.mark.longer
@pytest.mark.parametrize("policy", ["quota", "feplb", "predict"])
def test_live_calls_equal_the_single_process(policy: str) -> None:
    cases = [LiveCase(seed, policy, at_once=seed % 2 == 0, random=policy != "predict") for seed in range(8)]
    on_ranks(compare_live_on_late_device, (cases,), ranks=2)


def test_live_calls_are_timed_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    with late_device.install("late"):
        seconds = streams.start_timer(torch.device("cpu"))()
        monkeypatch.setattr(late_device.Event, "query", lambda self: False)
        assert seconds() is None
        monkeypatch.undo()
    assert (streams.start_timer(torch.device("cpu"))()() or 0) > 0
