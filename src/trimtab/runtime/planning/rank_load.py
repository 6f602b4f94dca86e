"""`RankLoad`: what a rank knows of the load of its expert-parallel group, and what the rank that plans asks of it.
`assign_unread`: experts of tokens whose output nothing uses, so that the ranks have equally many rows.

A rank keeps its own rows by expert and the sum of all ranks. Rows of the other ranks are exchanged for its own home
experts, or for the layers that it plans, so that no rank has the rows of all ranks for all experts and layers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.planner import Schedule, StepPlan, Workload
from trimtab.planner.plan.workload import ExpertLoads
from trimtab.runtime.ranks.topology import Topology
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts

# Most bytes of a message round to the rank that plans, apart from one micro-step's.
ROUND_BYTES = 1 << 26


@dataclass(frozen=True, eq=False)
class RankLoad:
    """One rank's rows of a step. Methods are collective over the ranks of the expert-parallel group.

    Attributes:
        counts_MLE: `[M, L, E]` int32, known rows of this rank by micro-step, layer and expert.
        unknown_ML: `[M, L]` int32, its rows whose expert is unknown.
        topology: process groups.
    """

    counts_MLE: Array
    unknown_ML: Array
    topology: Topology

    @classmethod
    def of(cls, trace: RoutingTrace, schedule: Schedule, rank: int, topology: Topology) -> RankLoad:
        """Count a rank's sequences, in the order of `schedule.sequences_of(rank)`. Not a collective."""
        micro_step, num_micro_steps = schedule.of_rank(rank), schedule.num_micro_steps
        counts_MLE = count_experts(trace, micro_step, num_micro_steps)
        rows_M = np.bincount(micro_step, trace.sequence_lengths * trace.top_k, num_micro_steps).astype(np.int64)
        unknown_ML = rows_M[:, None] - counts_MLE.sum(axis=2, dtype=np.int64)
        return cls(counts_MLE, unknown_ML.astype(np.int32), topology)

    @cached_property
    def of_group(self) -> ExpertLoads:
        """The rows of all ranks together. A collective at its first use."""
        counts_MLE, unknown_ML = self.counts_MLE.copy(), self.unknown_ML.copy()
        for array in (counts_MLE, unknown_ML):
            dist.all_reduce(torch.from_numpy(array), group=self.topology.expert_control)
        return ExpertLoads(counts_MLE, unknown_ML, self.topology.num_ranks)

    def for_homes(self, experts_RH: Array) -> Array:
        """Known rows `[R, M, L, H]` int32 of every rank for this rank's home experts.

        Args:
            experts_RH: `[R, H]`, the home experts of every rank.
        """
        sent_RMLH = np.ascontiguousarray(self.counts_MLE[:, :, experts_RH].transpose(2, 0, 1, 3))
        found_RMLH = np.empty_like(sent_RMLH)
        found, sent = torch.from_numpy(found_RMLH), torch.from_numpy(sent_RMLH)
        dist.all_to_all_single(found, sent, group=self.topology.expert_control)
        return found_RMLH

    def for_layers(self, layers_R: Sequence[range]) -> Workload:
        """The load of this rank's layers, of all ranks.

        Args:
            layers_R: neighbouring layers of every rank; together all layers, in ascending order.
        """
        splits, mine, ranks = [len(layers) for layers in layers_R], layers_R[self.topology.rank], len(layers_R)

        def exchanged(array_ML: Array) -> Array:
            sent_LM = np.ascontiguousarray(array_ML.swapaxes(0, 1))
            found_RLM = np.empty((ranks * len(mine), *sent_LM.shape[1:]), sent_LM.dtype)
            dist.all_to_all_single(
                torch.from_numpy(found_RLM), torch.from_numpy(sent_LM), [len(mine)] * ranks, splits,
                group=self.topology.expert_control,
            )  # fmt: skip
            # From [rank, layer, micro-step] to [micro-step, layer, rank].
            return np.ascontiguousarray(found_RLM.reshape(ranks, len(mine), *sent_LM.shape[1:]).swapaxes(0, 2))

        return Workload(exchanged(self.counts_MLE), exchanged(self.unknown_ML))


class RequestedCounts:
    """Counts of one step in an expert-parallel group. The first rank calls `count` and at last `end`, others `serve`.

    Args:
        load: of this rank.
    """

    def __init__(self, load: RankLoad) -> None:
        self._load = load
        self._group = load.topology.expert_control
        self._lock = threading.Lock()

    def count(self, micro_steps: Array, layers: Array) -> Workload:
        """The load of some micro-steps and layers, ascending `[N]` integers each. From any thread."""
        with self._lock:
            num_micro_steps, num_layers = self._load.unknown_ML.shape
            request = np.zeros(1 + num_micro_steps + num_layers, bool)
            request[0] = request[1 + micro_steps] = request[1 + num_micro_steps + layers] = True
            self._broadcast(request)
            found = self._gather(micro_steps, layers)
        assert found is not None
        return found

    def serve(self) -> None:
        """Answer requests until `end`."""
        num_micro_steps, num_layers = self._load.unknown_ML.shape
        while (request := self._broadcast(np.zeros(1 + num_micro_steps + num_layers, bool)))[0]:
            wanted_M, wanted_L = request[1 : 1 + num_micro_steps], request[1 + num_micro_steps :]
            self._gather(np.flatnonzero(wanted_M), np.flatnonzero(wanted_L))

    def end(self) -> None:
        """Tell the other ranks that there are no more requests."""
        with self._lock:
            self._broadcast(np.zeros(1 + sum(self._load.unknown_ML.shape), bool))

    def _broadcast(self, request: Array) -> Array:
        dist.broadcast(torch.from_numpy(request), group=self._group, group_src=0)
        return request

    def _gather(self, micro_steps: Array, layers: Array) -> Workload | None:
        """On the first rank the load of all ranks. In rounds, so that it is in memory little more than once."""
        load, is_first, ranks = self._load, self._load.topology.rank == 0, self._load.topology.num_ranks
        experts = load.counts_MLE.shape[2]
        shape = len(micro_steps), len(layers), ranks if is_first else 0
        counts_MLRE, unknown_MLR = np.empty((*shape, experts), np.int32), np.empty(shape, np.int32)
        step = max(1, ROUND_BYTES // (4 * ranks * max(1, len(layers)) * (experts + 1)))
        for start in range(0, len(micro_steps), step):
            mine = slice(start, start + step)
            chosen = np.ix_(micro_steps[mine], layers)
            rows_MLF = np.concatenate([load.counts_MLE[chosen], load.unknown_ML[chosen][:, :, None]], axis=2)
            rows_RMLF = np.empty((shape[2], *rows_MLF.shape), np.int32)
            parts = [*torch.from_numpy(rows_RMLF)] if is_first else None
            dist.gather(torch.from_numpy(rows_MLF), parts, group=self._group, group_dst=0)
            counts_MLRE[mine] = rows_RMLF[..., :-1].transpose(1, 2, 0, 3)
            unknown_MLR[mine] = rows_RMLF[..., -1].transpose(1, 2, 0)
        return Workload(counts_MLRE, unknown_MLR) if is_first else None


def checked_load(plan: StepPlan, trace: RoutingTrace, load: RankLoad | None, topology: Topology) -> RankLoad:
    """This rank's load under a plan of its group; counted if None. Raises InputError if the plan is not for it.

    Args:
        load: of the step that the session has just planned.
    """
    if load is None:
        plan.check_form(plan.num_micro_steps, trace.num_layers, topology.num_ranks, trace.num_experts)
        load = RankLoad.of(trace, plan.schedule, topology.rank, topology)
    plan.check_quotas(load.counts_MLE[:, :, None], topology.rank)
    return load


def assign_unread(trace: RoutingTrace, unread_T: Array, experts_RH: Array, topology: Topology) -> None:
    """Give this rank's unread tokens distinct experts in every layer, in place.

    Collective over the expert-parallel group. The rows of all ranks' unread tokens go to the ranks with the fewest
    other rows, and evenly to the experts of a rank.

    Args:
        trace: each micro-step as one sequence; unread tokens have unknown routes.
        unread_T: `[T]` bool, the unread tokens.
        experts_RH: `[R, H]`, the home experts of every rank.
    """
    num_micro_steps, top_k, rank = trace.num_sequences, trace.top_k, topology.rank
    micro_step_T = np.repeat(np.arange(num_micro_steps), trace.sequence_lengths)
    counts_MLE = count_experts(trace, np.arange(num_micro_steps), num_micro_steps)
    loads_MLR, num_homes = counts_MLE[:, :, experts_RH].sum(axis=3), experts_RH.shape[1]
    unread_RM = np.zeros((topology.num_ranks, num_micro_steps), np.int64)
    unread_RM[rank] = np.bincount(micro_step_T[unread_T], minlength=num_micro_steps)
    sums = [torch.from_numpy(array.astype(np.int64)) for array in (loads_MLR, unread_RM)]
    for array in sums:
        dist.all_reduce(array, group=topology.expert_control)
    loads_MLR, unread_RM = (array.numpy() for array in sums)
    for micro_step in np.flatnonzero(unread_RM[rank]).tolist():
        mine, total = np.flatnonzero(unread_T & (micro_step_T == micro_step)), int(unread_RM[:, micro_step].sum())
        places_UK = _numbers(unread_RM[:, micro_step], rank)[:, None] + np.arange(top_k) * total
        for layer, loads_R in enumerate(loads_MLR[micro_step]):
            rows_R = _levelling(loads_R, top_k * total, num_homes * total)
            rows_RH = rows_R[:, None] // num_homes + (np.arange(num_homes) < rows_R[:, None] % num_homes)
            # Token u has the experts at places u, u + total, u + 2 total ... of a list of all rows by expert. They are
            # distinct, since no expert has more than `total` rows.
            ends = np.cumsum(rows_RH.reshape(-1))
            trace.expert_ids[mine, layer] = experts_RH.reshape(-1)[np.searchsorted(ends, places_UK, side="right")]


def _numbers(unread_R: Array, rank: int) -> Array:
    """Numbers of a rank's unread tokens among those of all ranks, which are mixed evenly."""
    parts = [(np.arange(count) + 0.5) / max(count, 1) for count in unread_R.tolist()]
    numbers = np.empty(int(unread_R.sum()), np.int64)
    numbers[np.argsort(np.concatenate(parts), kind="stable")] = np.arange(len(numbers))
    start = int(unread_R[:rank].sum())
    return numbers[start : start + int(unread_R[rank])]


def _levelling(loads_R: Array, rows: int, most: int) -> Array:
    """How many of `rows` to add to each rank, at most `most`, so that the largest of these loads is smallest."""

    def added(level: int) -> Array:
        return np.clip(level - loads_R, 0, most)

    low, high = int(loads_R.min()), int(loads_R.max()) + most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if added(middle).sum() <= rows else (low, middle - 1)
    rows_R = added(low)
    grows_R = added(low + 1) > rows_R
    return rows_R + (grows_R & (np.cumsum(grows_R) <= rows - rows_R.sum()))
