"""What each balancer chooses in the instances of one step, to compare their stragglers.

* `fastermoe`: shadows of FasterMoE, from the counts of the layer; its own recipe, without a limit of memory.
* `feplb`, `quota`: the live policies of the runtime, from the counts of the layer.
* `feplb, fixed`: the same as `feplb`, with the first experts of every rank as dynamic ones, not the hottest of the
  micro-step before.
* `predict`: the live policy of the runtime; replicas from the counts of the micro-step before, the split from those of
  the layer.
* `foresight`: Trimtab's plan from the whole step's recorded routing: schedule, homes, replicas and split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.benchmarks.live_settings import LiveBenchmark
from trimtab.benchmarks.planner_cases import PlannerCase
from trimtab.planner import PlanSettings, StepPlan
from trimtab.policies.policy import Policy
from trimtab.policies.rivals.fastermoe import FasterMoe
from trimtab.policies.trimtab import Trimtab
from trimtab.runtime.live.balancer import LiveBalancer
from trimtab.runtime.live.policies import LivePolicy
from trimtab.runtime.rows.physical_experts import InstanceReplicas
from trimtab.runtime.state.home_experts import HomeExperts

LIVE: tuple[LivePolicy, ...] = ("feplb", "quota", "predict")
BEFORE = "before"
FIXED = "feplb, fixed"


@dataclass(frozen=True, eq=False)
class ChosenInstance:
    """The replicas of one instance, whatever chose them.

    Attributes:
        counts_RE: `[R, E]` int64 rows by source rank and expert.
        home_E: `[E]` home ranks.
        replicas: with their rows by source rank.
        moves: whether rows of replicas are sent from their homes, after the dispatch.
    """

    counts_RE: Array
    home_E: Array
    replicas: InstanceReplicas
    moves: bool = False

    @property
    def computed_RE(self) -> Array:
        """`[R, E]` int64, rows of each expert that each rank computes."""
        computed_RE = np.zeros_like(self.counts_RE)
        experts, ranks = self.replicas.experts, self.replicas.ranks
        tokens_P = self.replicas.quotas_PR.sum(axis=1)
        computed_RE[self.home_E, np.arange(len(self.home_E))] = self.counts_RE.sum(axis=0)
        np.subtract.at(computed_RE, (self.home_E[experts], experts), tokens_P)
        np.add.at(computed_RE, (ranks, experts), tokens_P)
        return computed_RE

    @property
    def sent_rows(self) -> int:
        """Rows that the dispatch sends to another rank, and those that leave their home again."""
        experts, ranks, quotas_PR = self.replicas.experts, self.replicas.ranks, self.replicas.quotas_PR
        at_home_RE = self.home_E == np.arange(len(self.counts_RE))[:, None]
        sent = int(self.counts_RE[~at_home_RE].sum())
        if self.moves:
            return sent + int(quotas_PR.sum())
        # A replica's rows are sent to it at once.
        away_PR = ranks[:, None] != np.arange(len(self.counts_RE))
        from_home_PR = self.home_E[experts][:, None] != np.arange(len(self.counts_RE))
        return sent + int(quotas_PR[away_PR].sum()) - int(quotas_PR[from_home_PR].sum())


def choose_all(case: PlannerCase, settings: LiveBenchmark) -> dict[str, list[ChosenInstance]]:
    """The instances of a step by balancer, and `before` without any.

    The first micro-step is left out: it is the past of those that learn from earlier counts.
    """
    counts_MLRE = case.workload(case.schedule).token_counts_MLRE.astype(np.int64)
    chosen = {BEFORE: _live(case, counts_MLRE, "off", settings), "fastermoe": _planned(case, FasterMoe(), settings)}
    chosen |= {policy: _live(case, counts_MLRE, policy, settings) for policy in LIVE}
    chosen[FIXED] = _live(case, counts_MLRE, "feplb", settings, forgets=True)
    chosen["foresight"] = _planned(case, Trimtab(), settings)
    return chosen


def slots_of(policy: str, settings: LiveBenchmark) -> int | None:
    """Slots of a rank; None without a limit."""
    return {BEFORE: 0, "fastermoe": None, "feplb": settings.feplb_slots, FIXED: settings.feplb_slots}.get(
        policy, settings.slots
    )


def _live(
    case: PlannerCase, counts_MLRE: Array, policy: LivePolicy, settings: LiveBenchmark, *, forgets: bool = False
) -> list[ChosenInstance]:
    """The choices of the runtime, micro-step by micro-step; `forgets`: without a past."""
    slots = settings.feplb_slots if policy == "feplb" else settings.slots
    limits = PlanSettings().limits(case.cluster(slots))
    home_LE = case.contiguous.home
    layers = layers_of(home_LE)
    balancer = LiveBalancer(policy, "last", layers, limits)
    measured_RS = np.zeros((case.ranks, 2), np.int64)
    chosen = []
    for micro_step, counts_LRE in enumerate(counts_MLRE):
        if forgets:
            balancer = LiveBalancer(policy, "last", layers, limits)
        for layer, counts_RE in enumerate(counts_LRE):
            call = balancer.choose(layer, counts_RE, measured_RS)
            if micro_step:
                chosen.append(ChosenInstance(counts_RE, home_LE[layer], call.replicas, call.moves))
    return chosen


def layers_of(home_LE: Array) -> list[HomeExperts]:
    """Layers on rank 0 with these homes, and experts of one number."""
    return [_layer(layer, home_E) for layer, home_E in enumerate(home_LE)]


def _layer(index: int, home_E: Array) -> HomeExperts:
    weights = [torch.nn.Parameter(torch.zeros(int(np.count_nonzero(home_E == 0)), 1))]
    return HomeExperts(index, lambda: weights, rank=0, home_E=home_E)


def _planned(case: PlannerCase, policy: Policy, settings: LiveBenchmark) -> list[ChosenInstance]:
    """The instances of a policy's plan, on its own recipe."""
    placement = case.warm if policy.traits.relocates else case.contiguous
    plan: StepPlan = policy.plan(case.view(policy, placement, settings.slots, equal_terms=False))
    counts_MLRE = case.workload(plan.schedule).token_counts_MLRE.astype(np.int64)
    return [
        ChosenInstance(counts_RE, plan.home[layer], InstanceReplicas.of(plan, micro_step, layer))
        for micro_step, counts_LRE in enumerate(counts_MLRE)
        for layer, counts_RE in enumerate(counts_LRE)
        if micro_step
    ]
