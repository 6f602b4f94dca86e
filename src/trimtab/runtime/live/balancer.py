"""`LiveBalancer`: chooses the replicas of live calls of layers, and keeps what later choices need.

Replicas are chosen from an instance's counts in integers: the same on all ranks that have the same counts.

* `choose_quotas`: Trimtab's own replicas and split, as for a planned instance.
* `choose_moves`: FEPLB's whole experts (arXiv 2604.19654), within a node.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakValueDictionary

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.plan.workload import max_over_mean
from trimtab.planner.replicas.instance_choice import choose_replicas
from trimtab.planner.replicas.kernel_values import Limits
from trimtab.planner.replicas.whole_experts import InstanceLoad, choose_whole_experts
from trimtab.runtime.program.physical_experts import InstanceReplicas
from trimtab.runtime.state.home_experts import HomeExperts

LivePolicy = Literal["quota", "feplb", "off"]


@dataclass(eq=False)
class LiveCall:
    """One call of a layer. Transfers know it for as long as it is used.

    Attributes:
        number: of the call, in the order of calls from 0; equal on all ranks.
        layer: the layer.
        replicas: what was chosen.
        moves: whether rows reach replicas in a second phase, from their homes, instead of at once.
    """

    number: int
    layer: int
    replicas: InstanceReplicas
    moves: bool


class LiveMicroStep:
    """The calls of one micro-step.

    Where a checkpoint runs a layer again in backward, it needs the choice of the forward, although FEPLB's would be
    another by then. It has the same rows, so that is the call with the same counts.

    Attributes:
        balancer: makes the choices.
    """

    def __init__(self, balancer: LiveBalancer) -> None:
        self.balancer = balancer
        self._calls: dict[tuple[int, bytes], LiveCall] = {}

    def choose(self, layer: int, counts_RE: Array) -> LiveCall:
        """The choice of a call; see `LiveBalancer.choose`."""
        key = layer, counts_RE.tobytes()
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self.balancer.choose(layer, counts_RE)
        return call


@dataclass(eq=False)
class Figures:
    """What was chosen, since it was last asked for.

    Attributes:
        calls: of layers.
        replicas, used: replicas, and those with rows.
        vio_before, vio_after: sums over calls of max/mean - 1 of rank loads.
        choosing_s: seconds of choosing.
    """

    calls: int = 0
    replicas: int = 0
    used: int = 0
    vio_before: float = 0.0
    vio_after: float = 0.0
    choosing_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        """By the names of `Session.take_metrics`."""
        calls = max(1, self.calls)
        return {
            "live/calls": self.calls,
            "live/replicas": self.replicas,
            "live/used_replicas": self.used / max(1, self.replicas),
            "live/max_vio_before": self.vio_before / calls,
            "live/max_vio_after": self.vio_after / calls,
            "live/choosing_s": self.choosing_s,
        }


class LiveBalancer:
    """The choices of one rank, equal on all ranks that see the same counts. It is the `ReplicasOfStep` of transfers,
    whose micro-steps are the numbers of calls.

    Args:
        policy: see `Session`.
        layers: home experts of all layers.
        limits: of the planner.

    Attributes:
        last: the number of the last call; -1 before the first.
        figures: of the choices.
    """

    may_have_any = True

    def __init__(self, policy: LivePolicy, layers: Sequence[HomeExperts], limits: Limits) -> None:
        self.policy = policy
        self._layers, self._limits = layers, limits
        self.last = -1
        self._calls: WeakValueDictionary[int, LiveCall] = WeakValueDictionary()
        # By layer, of its last call; for FEPLB.
        self._past: dict[int, Array] = {}
        self.figures = Figures()

    def choose(self, layer: int, counts_RE: Array) -> LiveCall:
        """The choice of the next call, of a layer whose rows are known.

        Args:
            counts_RE: `[R, E]` int64 rows by source rank and expert.
        """
        start = time.perf_counter()
        self.last += 1
        homes, home_E = self._layers[layer], self._layers[layer].places.home_E
        if self.policy == "quota":
            replicas = choose_quotas(counts_RE, home_E, self._limits)
        elif self.policy == "feplb":
            replicas = choose_moves(counts_RE, home_E, homes.places.rows_E, self._dynamic(layer, homes), self._limits)
            self._past[layer] = counts_RE
        else:
            replicas = InstanceReplicas.none(len(counts_RE))
        self._count(counts_RE, home_E, replicas, time.perf_counter() - start)
        call = self._calls[self.last] = LiveCall(self.last, layer, replicas, self.policy == "feplb")
        return call

    def take_metrics(self) -> dict[str, float]:
        """Figures of the choices since the last call."""
        figures, self.figures = self.figures, Figures()
        return figures.metrics()

    def count(self, micro_step: int, layer: int) -> int:
        """See `ReplicasOfStep`."""
        replicas = self._replicas_of(micro_step, layer)
        return 0 if replicas is None else replicas.count

    def of(self, micro_step: int, layer: int) -> InstanceReplicas:
        """See `ReplicasOfStep`."""
        replicas = self._replicas_of(micro_step, layer)
        assert replicas is not None
        return replicas

    def _replicas_of(self, number: int, layer: int) -> InstanceReplicas | None:
        call = self._calls.get(number)
        return call.replicas if call is not None and call.layer == layer else None

    def _dynamic(self, layer: int, homes: HomeExperts) -> Array:
        """`[E]` bool: on every rank as many experts as it has slots, those with most rows before, or its first ones."""
        past_RE = self._past.get(layer)
        experts_RH = homes.places.experts_RH
        if past_RE is not None:
            hottest_RH = np.argsort(-past_RE.sum(axis=0)[experts_RH], axis=1, kind="stable")
            experts_RH = np.take_along_axis(experts_RH, hottest_RH, axis=1)
        dynamic_E = np.zeros(homes.num_experts, np.bool_)
        dynamic_E[experts_RH[:, : self._limits.slots]] = True
        return dynamic_E

    def _count(self, counts_RE: Array, home_E: Array, replicas: InstanceReplicas, seconds: float) -> None:
        counts_E, num_ranks = counts_RE.sum(axis=0), len(counts_RE)
        before_R = np.bincount(home_E, counts_E, num_ranks)
        after_R, tokens_P = before_R.copy(), replicas.quotas_PR.sum(axis=1)
        np.subtract.at(after_R, home_E[replicas.experts], tokens_P)
        np.add.at(after_R, replicas.ranks, tokens_P)
        figures = self.figures
        figures.calls += 1
        figures.replicas += replicas.count
        figures.used += int(np.count_nonzero(tokens_P))
        figures.vio_before += float(max_over_mean(before_R)) - 1
        figures.vio_after += float(max_over_mean(after_R)) - 1
        figures.choosing_s += seconds


def choose_quotas(counts_RE: Array, home_E: Array, limits: Limits) -> InstanceReplicas:
    """Replicas and quotas of an instance.

    Args:
        counts_RE: `[R, E]` int64 rows by source rank and expert.
        home_E: `[E]` int16.
    """
    return InstanceReplicas.chosen(*choose_replicas(counts_RE, home_E, limits))


def choose_moves(
    counts_RE: Array, home_E: Array, rows_E: Array, dynamic_E: Array, limits: Limits, *, smallest_move: int = 1
) -> InstanceReplicas:
    """Whole experts that move to less loaded ranks of their node, with all their rows.

    Args:
        counts_RE, home_E: as in `choose_quotas`.
        rows_E: `[E]` int64, the row of each expert on its home rank.
        dynamic_E: `[E]` bool, the experts that may move.
        smallest_move: fewest rows of an expert that moves.

    Returns:
        Replicas ordered by rank, home and row: the order in which rows arrive in the second phase.
    """
    counts_E, num_ranks = counts_RE.sum(axis=0), len(counts_RE)
    homes = home_E.astype(np.int64)
    loads_R = np.bincount(homes, counts_E, num_ranks).astype(np.int64)
    load = InstanceLoad(counts_E, homes, loads_R, limits.ranks_per_node, limits.ranks_per_node, limits.slots)
    moves_P2 = np.empty((num_ranks * limits.slots, 2), np.int64)
    count = choose_whole_experts(load, dynamic_E & (counts_E >= max(smallest_move, 1)), moves_P2)
    experts, ranks = moves_P2[:count].T
    in_order = np.lexsort((rows_E[experts], homes[experts], ranks))
    experts, ranks = experts[in_order], ranks[in_order]
    return InstanceReplicas.chosen(experts, ranks, counts_RE.T[experts].astype(np.int64))
