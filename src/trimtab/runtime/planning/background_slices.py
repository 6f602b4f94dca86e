"""`StepSlices`: replicas and split of a step, planned and exchanged while the step runs.

A thread of low priority on every rank plans its part of the layers in rounds of micro-steps, and gathers the parts of
the other ranks over a process group that only these threads use. Digests of the rounds are chained, from the header's
on. The ranks compare them when they enter a micro-step, and use the replicas of a round once all have it. What is late
delays nothing: its micro-steps run without replicas.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.errors import RanksDisagreeError
from trimtab.planner import StepPlan
from trimtab.planner.plan.slices import SlicePlanner, SliceRules, from_bytes, layers_of_rank, rounds_of, to_bytes
from trimtab.planner.plan.workload import max_over_mean
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.runtime.planning.rank_load import RankLoad
from trimtab.runtime.program.physical_experts import CACHED_MICRO_STEPS, InstanceReplicas
from trimtab.runtime.ranks.rank_calls import CallThread
from trimtab.runtime.ranks.topology import Topology

# Rounds that the ranks compare when they enter a micro-step.
COMPARED = 3
# Added to the niceness of the planner's thread, so that the model's threads go first.
NICENESS = 5
PARTS_PER_MILLION = 1_000_000
_GO_ON, _STOP, _FAILED = range(3)
_threads: WeakKeyDictionary[dist.ProcessGroup, CallThread] = WeakKeyDictionary()


class StepSlices:
    """The slices of one step on this rank. `run` is for the planner's thread, all else for the training thread.

    Args:
        header: the plan without replicas.
        planner: plans slices of this rank's expert-parallel group.
        expected_max_vio: see `SliceRules`.

    Attributes:
        can_exchange: whether the threads' process group still works.
    """

    may_have_any = True

    def __init__(
        self, header: StepPlan, planner: SlicePlanner, topology: Topology, *, expected_max_vio: float = 0.0
    ) -> None:
        self._header, self._planner, self._topology = header, planner, topology
        self._rounds = rounds_of(header.num_micro_steps)
        self._round_of = [number for number, micro_steps in enumerate(self._rounds) for _ in micro_steps]
        self._plans: list[StepPlan] = []
        self._digests = [bytes.fromhex(header.hash)]
        self._agreed = self._made = 0
        self._max_vio = self._busy_s = 0.0
        self._expected_max_vio = expected_max_vio
        self._stops, self._is_done, self.can_exchange = False, False, True
        self._changed = threading.Condition()
        self._counts_ML: list[list[int]] = []
        self._num_late = 0
        self._slowest: list[int] = []
        self._problem = ""
        self.of = lru_cache(CACHED_MICRO_STEPS * header.num_layers)(self._of)

    def run(self) -> None:
        """Plan and gather all rounds, until a rank stops or fails. Collective over the threads of the group."""
        try:
            if hasattr(os, "setpriority"):
                # Of this thread, on Linux.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            for micro_steps in self._rounds:
                if not self._run_round(micro_steps):
                    break
        except BaseException as error:
            # The exchange failed, for example because a rank has ended, or the thread was told to end.
            self.can_exchange = False
            self._problem = f"the exchange of slices failed: {error!r}"
        finally:
            with self._changed:
                self._is_done = True
                self._changed.notify_all()

    def _run_round(self, micro_steps: range) -> bool:
        """Returns whether to go on."""
        start = time.perf_counter()
        topology, num_layers = self._topology, self._header.num_layers
        mine, flag, vio = b"", _STOP if self._stops else _GO_ON, 0.0
        try:
            if flag == _GO_ON:
                layers = layers_of_rank(num_layers, topology.rank, topology.num_ranks)
                tables = self._planner.plan(micro_steps, layers)
                mine = to_bytes(tables)
                if layers:
                    # Sum over the instances.
                    vio = float((max_over_mean(self._planner.loads(micro_steps, tables)) - 1).sum())
        except Exception as error:
            self._problem, flag = f"the planner failed: {error!r}", _FAILED
        self._made += 1
        figures_RF, parts = _gather(mine, (flag, round(vio * PARTS_PER_MILLION)), topology)
        flags = figures_RF[:, 0].tolist()
        if any(flags):
            failed = [str(rank) for rank, flag in enumerate(flags) if flag == _FAILED]
            if failed and not self._problem:
                self._problem = f"the planner of rank {', '.join(failed)} failed"
            return False
        table = ReplicaTable.join_layers([table for part in parts for table in from_bytes(part)])
        mixed_ML = self._header.mixed_ML[micro_steps.start : micro_steps.stop]
        plan = replace(self._header, mixed_ML=mixed_ML).with_replicas(table, self._planner.paths(table))
        digest = hashlib.blake2b(b"".join([self._digests[-1], *parts]), digest_size=8).digest()
        with self._changed:
            self._plans.append(plan)
            self._digests.append(digest)
            self._max_vio += figures_RF[:, 1].sum() / (PARTS_PER_MILLION * self._header.mixed_ML.size)
            self._busy_s += time.perf_counter() - start
            self._changed.notify_all()
        return True

    def wait(self, micro_step: int, most_s: float | None) -> float:
        """Wait until a micro-step's slices are here, for at most `most_s` if it is given; returns the seconds."""
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._is_done or len(self._plans) > self._round_of[micro_step], most_s)
        return time.perf_counter() - start

    def to_compare(self) -> list[int]:
        """Integers that the ranks exchange when they enter a micro-step; see `agree`."""
        with self._changed:
            digests = self._digests[1 + self._agreed : 1 + self._agreed + COMPARED]
            numbers = [int.from_bytes(digest, "little", signed=True) or 1 for digest in digests]
            return [self._made, *numbers, *[0] * (COMPARED - len(numbers))]

    def agree(self, values_RV: Array, micro_step: int) -> None:
        """Use the rounds that all ranks have.

        Args:
            values_RV: `to_compare` of all ranks.

        Raises:
            RanksDisagreeError: if their slices differ.
        """
        for digests_R in values_RV[:, 1:].T:
            if not digests_R.all():
                break
            if (digests_R != digests_R[0]).any():
                other = int(np.flatnonzero(digests_R != digests_R[0])[0])
                raise RanksDisagreeError(
                    f"ranks disagree in the plan of micro-step {self._rounds[self._agreed].start}: rank 0 and rank "
                    f"{other} of the expert-parallel group have different replicas"
                )
            counts = np.diff(self._plans[self._agreed].replica_starts).reshape(-1, self._header.num_layers)
            self._counts_ML += counts.tolist()
            self._agreed += 1
        if not self.is_agreed(micro_step):
            self._num_late += 1
            self._slowest = np.flatnonzero(values_RV[:, 0] == values_RV[:, 0].min()).tolist()

    def is_agreed(self, micro_step: int) -> bool:
        """Whether all ranks have a micro-step's replicas."""
        return 0 <= micro_step < len(self._round_of) and self._round_of[micro_step] < self._agreed

    def is_here(self, micro_step: int) -> bool:
        """Whether this rank has a micro-step's replicas."""
        return len(self._plans) > self._round_of[micro_step]

    def count(self, micro_step: int, layer: int) -> int:
        """Replicas of an instance on all ranks; 0 while its slice is not agreed."""
        return self._counts_ML[micro_step][layer] if 0 <= micro_step < len(self._counts_ML) else 0

    def _of(self, micro_step: int, layer: int) -> InstanceReplicas:
        number = self._round_of[micro_step]
        return InstanceReplicas.of(self._plans[number], micro_step - self._rounds[number].start, layer)

    def end(self, patience_s: float | None) -> bool:
        """Stop planning, and tell if much was late. Returns whether the thread is done and can be used again."""
        self._stops = True
        with self._changed:
            is_done = self._changed.wait_for(lambda: self._is_done, patience_s)
        # A few at the beginning are counted only.
        if self._problem or (self._num_late and 2 * self._num_late >= self._header.num_micro_steps):
            logging.getLogger("trimtab").warning(
                "%d micro-steps ran without replicas, since their plan was late: %s",
                self._num_late,
                self._problem or f"waiting for rank {', '.join(map(str, self._slowest))}",
            )
        self._num_late, self._problem = 0, ""
        return is_done and self.can_exchange

    def whole_plan(self) -> StepPlan:
        """The header with all replicas that are planned; waits for these."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_done)
        tables = [plan.replicas for plan in self._plans]
        missing = self._header.mixed_ML.size - sum(plan.mixed_ML.size for plan in self._plans)
        table = ReplicaTable.concatenate([*tables, ReplicaTable.none(missing)])
        paths = [plan.replica_paths for plan in self._plans]
        return self._header.with_replicas(table, np.concatenate([np.zeros(0, np.uint8), *paths]))

    def metrics(self) -> dict[str, float]:
        """Figures of what is planned so far."""
        with self._changed:
            planned = sum(plan.num_replicas for plan in self._plans)
            figures: dict[str, float] = {"moe/planned_replicas": planned, "plan/background_s": self._busy_s}
            if len(self._plans) == len(self._rounds):
                figures["moe/planned_max_vio"] = self._max_vio
                figures["moe/max_vio_error"] = self._max_vio - self._expected_max_vio
            return figures


def start_slices(header: StepPlan, load: RankLoad, rules: SliceRules, topology: Topology) -> StepSlices:
    """Start to plan the slices of a step on the planner's thread. Collective over the expert-parallel group."""
    layers_R = [layers_of_rank(header.num_layers, rank, topology.num_ranks) for rank in range(topology.num_ranks)]
    workload, first_layer = load.for_layers(layers_R), layers_R[topology.rank].start
    planner = SlicePlanner.of(rules, topology.group, workload, header.home, first_layer)
    slices = StepSlices(header, planner, topology, expected_max_vio=rules.max_vio)
    planner_thread(topology).start(slices.run)
    return slices


def planner_thread(topology: Topology) -> CallThread:
    """The thread that plans for this rank's expert-parallel group. Sessions of the same ranks share it, as they share
    the process group: all ranks run the steps of these sessions in the same order."""
    thread = _threads.get(topology.planning)
    if thread is None:
        thread = _threads[topology.planning] = CallThread("trimtab-planner")
    return thread


def _gather(mine: bytes, figures: Sequence[int], topology: Topology) -> tuple[Array, list[bytes]]:
    """Integers `[R, F]` of all ranks, and their bytes. Collective over the planner's threads."""
    gathered: list[Any] = [None] * topology.num_ranks
    dist.all_gather_object(gathered, (figures, mine), group=topology.planning)
    figures_R, parts = zip(*gathered, strict=True)
    return np.array(figures_R), list(parts)
