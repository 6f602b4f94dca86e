"""The order of copies and messages on CUDA, checked on a simulated accelerator: see `helpers.late_device`.

Mutants, in `tests/mutants/runtime.toml` and `helpers.transfer_mutants`, show that a test fails without a certain wait
or barrier. The long form runs more cases.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers import late_device
from helpers.programs import run_on_rank
from helpers.rank_pool import on_ranks
from helpers.rank_tests import runs_on_ranks
from helpers.transfer_mutants import mutated
from trimtab.cluster import ClusterSpec
from trimtab.planner import Placement, Schedule, StepPlan, Workload
from trimtab.planner.replicas.paths import HOST, PEER
from trimtab.runtime import Session, gated_experts
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer import message_rounds
from trimtab.runtime.transfer import ring as ring_module
from trimtab.runtime.transfer.message_rounds import Posted
from trimtab.runtime.transfer.mirror import NodeMirror
from trimtab.runtime.transfer.peer_memory import PeerMemory
from trimtab.runtime.transfer.ring import ReplicaRing
from trimtab.trace import synthesize

# How long a session with a mutant waits for messages; the cases.
SHORT = timedelta(seconds=4)
MUTANT_SEEDS = range(2, 16)
MUTANTS = [
    ("returns without wait", "late", "gradient|norm"),
    ("sends without wait", "late", "source of a message changed"),
    # gloo closes the connections of a rank whose message timed out.
    ("order of rank", "late", "Timed out|Connection closed by peer|AssertionError|RanksDisagreeError"),
    ("order of rank", "serial", "Timed out|Connection closed by peer|AssertionError|RanksDisagreeError"),
    # Messages of two groups that ranks post in opposite orders block each other only if they run one at a time.
    ("fetch after exchange", "serial", "Timed out|RanksDisagreeError"),
    ("copies without wait", "lazy", "logits|gradient|loss|IndexError|index"),
    ("copies at once", "early", "logits|gradient|loss|IndexError|index"),
]


def run_with_mutant(mutant: str, mode: str, seeds: Sequence[int]) -> None:
    """Cases in which experts move."""
    with late_device.install(mode, peers=mode in late_device.LATE_COMPUTE), mutated(mutant):
        for seed in seeds:
            run_on_rank(f"{seed}, between: renumber, recompute: first", others={"timeout": SHORT})


@pytest.mark.long
@pytest.mark.parametrize(("mutant", "mode", "text"), MUTANTS)
def test_cases_find_mutants(mutant: str, mode: str, text: str) -> None:
    """Ranks that wait for the one that raises are killed."""
    with pytest.raises(AssertionError, match=rf"(?m)^(?=\S*Error: ).*(?:{text})"):
        on_ranks(run_with_mutant, (mutant, mode, MUTANT_SEEDS), ranks=2)
    if mutant == "fetch after exchange":
        on_ranks(run_with_mutant, (mutant, "late", MUTANT_SEEDS[:2]), ranks=2)


def session_with_one_replica(path: int, **settings: Any) -> Session:
    """Rank 1 has a replica of rank 0's only expert, whose weights are 1."""
    session = Session(num_experts=2, **settings)
    session.add_layer([torch.nn.Parameter(torch.ones(1, 4, 4))], gated_experts())
    apply_one_replica(session, path)
    return session


def apply_one_replica(session: Session, path: int) -> None:
    """Apply a plan in which rank 1 has a replica of rank 0's only expert."""
    trace = synthesize(num_sequences=2, sequence_length=6, num_layers=1, num_experts=2, top_k=1, zipf=0.0)
    schedule = Schedule(np.zeros(2, np.int32), np.arange(2, dtype=np.int32), np.zeros(1, np.int32), 2)
    workload = Workload.from_trace(trace, schedule)
    plan = StepPlan.from_instances(
        schedule, Placement.contiguous(1, 2, 2), [np.array([[0, 1]])], [np.zeros((1, 2), np.int64)],
        mixed_ML=workload.mixed_ML, cluster=ClusterSpec(2, 2, slots_per_rank=1),
    )  # fmt: skip
    plan = replace(plan, replica_paths=np.full(1, path, np.uint8))
    session.apply_step_plan(plan, trace.select(schedule.sequences_of(session.rank)))


@pytest.mark.parametrize("path", [HOST, PEER])
@pytest.mark.parametrize("late", ["reader", "writer"])
@runs_on_ranks()
def test_weights_are_rewritten_between_barriers(path: int, late: str) -> None:
    """Weights change while rank 1 copies an expert of rank 0.

    With a late reader, rank 1 would end its copy after rank 0 has written the new weights; with a late writer, rank 0
    would write them after rank 1 has copied them anew. Without a barrier this happens within `patience_s`.
    """
    rank, patience_s = dist.get_rank(), 1.0
    with late_device.install("late", peers=path == PEER), pytest.MonkeyPatch.context() as patch:
        session = session_with_one_replica(path)
        ring, homes = session.transfers.ring, session.homes[0]
        source = ring.mirror.row(0, 0)[0] if ring.peers is None else ring.peers.row(0, 0, 0)[0]
        with torch.no_grad():
            with session.micro_step(0):
                """The copy begins."""
            for parameter in homes.parameters:
                parameter.mul_(2)
        drain, stage = ReplicaRing.drain, HomeExperts.stage

        def drain_late(ring: ReplicaRing) -> None:
            deadline = time.monotonic() + patience_s
            while source.max() == 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            drain(ring)

        def stage_late(layer: HomeExperts) -> None:
            time.sleep(patience_s)
            stage(layer)

        if late == "reader" and rank == 1:
            patch.setattr(ReplicaRing, "drain", drain_late)
        if late == "writer" and rank == 0:
            patch.setattr(HomeExperts, "stage", stage_late)
        with torch.no_grad(), session.micro_step(0):
            if rank == 1:
                ring.prefetch(0, 0)
                assert ring.replicas(0, 0)[0].min() == 2
        patch.undo()
        session.close()


def raise_on(condition: bool, error: Exception) -> None:
    if condition:
        raise error


def peer_memory_bytes(session: Session) -> float:
    return session.take_metrics()["transfer/peer_memory_bytes"]


@runs_on_ranks()
def test_ranks_read_each_other_if_a_plan_needs_it_and_try_it_once() -> None:
    with late_device.install("lazy", peers=True):
        session = session_with_one_replica(HOST)
        assert peer_memory_bytes(session) == 0
        apply_one_replica(session, PEER)
        assert peer_memory_bytes(session) > 0
        session.close()
    with late_device.install("lazy"), mock.patch.object(PeerMemory, "across", return_value=None) as across:
        session = session_with_one_replica(PEER)
        apply_one_replica(session, PEER)
        assert across.call_count == 1
        session.close()


@runs_on_ranks()
def test_on_cpus_only_live_micro_steps_read_each_other() -> None:
    session = session_with_one_replica(PEER)
    assert peer_memory_bytes(session) == 0
    session.mode = "live"
    with session.live_micro_step():
        assert peer_memory_bytes(session) > 0
    session.finish_gradients()
    session.mode = "plan"
    apply_one_replica(session, PEER)
    assert peer_memory_bytes(session) == 0
    session.close()


def random_homes(topology: Topology, experts: int, *shapes: tuple[int, ...]) -> HomeExperts:
    """Contiguous homes with this number of experts on each rank."""
    values = [torch.nn.Parameter(torch.rand(experts, *shape) + topology.rank) for shape in shapes]
    home_E = np.repeat(np.arange(topology.num_ranks), experts).astype(np.int16)
    return HomeExperts(0, lambda: values, rank=topology.rank, home_E=home_E)


@runs_on_ranks(3)
def test_far_mirrors_are_filled_in_rounds() -> None:
    """Every rank is a node, whose mirror holds the experts of all other ranks."""
    rank, ranks, experts = dist.get_rank(), dist.get_world_size(), 40
    topology = Topology.build(None, 1, ranks_per_node=1)
    for mode in late_device.MODES:
        with late_device.install(mode) as device:
            homes = random_homes(topology, experts, (3, 4), (5,))
            values, home_E = homes.parameters, homes.places.home_E
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
            assert device.messages <= 2 * 2 * 2 * (ranks - 1) * experts
            mirror.close()


@runs_on_ranks()
def test_mirrors_grow_by_half() -> None:
    """Within the session's limit, and without open files, which would keep memory."""
    topology = Topology.build(None, 1, None)
    homes, sizes = random_homes(topology, 100, (4, 8)), list[int]()
    files = len(os.listdir("/proc/self/fd"))
    for most in (1000, 45):
        mirror = NodeMirror(topology, homes.expert_like, homes.device, most * homes.expert_bytes)
        for count in (10, 11, 5, 40, 41):
            mirror.hold([np.stack([np.zeros(count, np.int64), np.arange(count)], axis=1)])
            mirror.refresh([homes])
            sizes.append(mirror.nbytes // homes.expert_bytes)
            if topology.rank == 0:
                assert all(torch.equal(mirror.row(0, e)[0], homes.parameters[0][e]) for e in range(count))
            assert len(os.listdir("/proc/self/fd")) <= files
        mirror.close()
    assert sizes == [10, 15, 15, 40, 60, 10, 15, 15, 40, 45]


@runs_on_ranks()
def test_mirrors_are_registered_until_they_grow_or_are_closed() -> None:
    topology = Topology.build(None, 1, None)
    homes, sizes = random_homes(topology, 30, (4, 8)), dict[int, int]()

    def register(address: int, nbytes: int, _: int) -> int:
        sizes[address] = nbytes
        return 2 if nbytes > 20 * homes.expert_bytes else 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=sizes.pop)
    with late_device.install("late"), mock.patch.object(torch.cuda, "cudart", return_value=cudart):
        mirror = NodeMirror(topology, homes.expert_like, homes.device)
        for count in (0, 10, 11, 5, 21):
            with pytest.raises(RuntimeError, match="status 2") if count == 21 else nullcontext():
                mirror.hold([np.stack([np.zeros(count, np.int64), np.arange(count)], axis=1)])
            assert [*sizes.values()] == [mirror.nbytes] * (count > 0)
        mirror.close()
    assert not sizes


@runs_on_ranks()
def test_compute_does_not_wait_for_its_own_sends() -> None:
    """Rank 1 has replicas of rank 0's expert. Only when the weights are about to change is the send waited for."""
    sends: list[dist.Work] = []

    def post(*args: Any, **named: Any) -> list[Posted]:
        posted = message_rounds.post(*args, **named)
        sends.extend(work for receives, work in posted if not receives)
        return posted

    with late_device.install("late"):
        session = session_with_one_replica(PEER)
        ring = session.transfers.ring
        with torch.no_grad(), mock.patch.object(ring_module, "post", post), session.micro_step(0):
            ring.prefetch(0, 0)
            ring.replicas(0, 0)
        assert [work.is_completed() for work in sends] == [False] * (dist.get_rank() == 0)
        ring.complete()
        assert all(work.is_completed() for work in sends)
        session.close()
