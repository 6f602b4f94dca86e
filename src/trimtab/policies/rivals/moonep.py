"""`moonep`: after gating, every rank gets exactly the mean load; the busiest home rank fills the emptiest rank.

Source: MoonEP (github.com/MoonshotAI/MoonEP; merged in vLLM 52101 and SGLang 33249, open in Megatron-LM 7450,
torchtitan 4751 and xtuner 2056); our reimplementation from public forks' plain reference of its planning kernel and
their documentation. In every layer, a GPU kernel plans from the counts of all ranks. Each rank must compute the mean, a
remainder goes to the first ranks. Until no rank is above it, the home rank furthest above gives the emptiest rank all
that this rank lacks. Then every home rank assigns experts: the largest quota gets tokens of the expert with most
tokens left. Ranks get ranges of an expert's tokens in source order. Weights are prefetched after the dispatch;
gradients return to the home. Shapes are static: every rank has a slot for each of its own experts, shared by all
layers.

With R ranks there are at most R - 1 quotas, since each of them completes a rank. A rank receives from one home rank
only and so never needs more slots than that rank has experts. A quota needs more than one copy only where an expert
runs out. With a hot expert on every giving rank there are therefore at most R - 1 copies, and never more than R - 1
plus the experts of giving ranks less one each.

Not specified by the source, and our choices:

* groups of several nodes: the source needs NVLink between all ranks of a group. Here every node balances itself, and
  its ranks get the node's mean;
* different numbers of tokens per rank, which the original does not allow: the mean is that of all ranks, as in a fork;
* planning time: published only in pictures; UltraEP's is charged;
* weights: prefetched while tokens are dispatched.

On equal terms a copy may be on any rank, and a rank without a free slot gets no more copies; the tokens stay at home.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner import StepPlan
from trimtab.planner.replicas.whole_experts import InstanceLoad
from trimtab.policies.planning_time import ULTRAEP_SIZES, PlanningTime
from trimtab.policies.policy import Traits, View
from trimtab.policies.rivals.replica_quotas import split_ranges


@dataclass(frozen=True)
class MoonEp:
    """Exactly even ranks, with as many slots on every rank as it has experts."""

    traits: ClassVar[Traits] = Traits(
        known_at="layer", planning=PlanningTime.published(*ULTRAEP_SIZES, source="UltraEP's"), within_node=True
    )

    def plan(self, view: View) -> StepPlan:
        cluster = view.cluster
        if not view.equal_terms:
            homes = max((np.bincount(home_E).max() for home_E in view.placement.home), default=0)
            cluster = replace(cluster, slots_per_rank=int(homes))

        def plan_one(_: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
            load = InstanceLoad.of(counts_RE.sum(axis=0), home_E, cluster, within_node=not view.equal_terms)
            tokens_ER = fill_exactly(load)
            end_ER = tokens_ER.cumsum(axis=1)
            experts_S, ranks_S = np.nonzero((tokens_ER > 0) & (home_E[:, None] != np.arange(cluster.ranks)))
            end_S = end_ER[experts_S, ranks_S]
            first_S = end_S - tokens_ER[experts_S, ranks_S]
            return split_ranges(counts_RE, np.stack([experts_S, ranks_S, first_S, end_S], axis=1))

        return view.plan_instances(plan_one, placement=view.placement, slots=cluster.slots_per_rank)


@kernel
def fill_exactly(load):  # type: ignore[no-untyped-def]
    """Tokens of every expert on every rank, `[E, R]` int64, from an `InstanceLoad`."""
    counts_E, home_E, loads_R, slots = load.counts_E, load.home_E, load.loads_R, load.slots
    num_ranks, num_experts, domain = len(loads_R), len(counts_E), load.ranks_per_domain
    tokens_ER = np.zeros((num_experts, num_ranks), np.int64)
    for e in range(num_experts):
        tokens_ER[e, home_E[e]] = counts_E[e]
    quotas_RR = np.zeros((num_ranks, num_ranks), np.int64)
    for first in range(0, num_ranks, domain):
        above_R = loads_R[first : first + domain].copy()
        total = above_R.sum()
        for r in range(domain):
            above_R[r] -= total // domain + (r < total % domain)
        while True:
            giver, taker = above_R.argmax(), above_R.argmin()
            if above_R[giver] <= 0:
                break
            quotas_RR[first + giver, first + taker] = -above_R[taker]
            above_R[giver] += above_R[taker]
            above_R[taker] = 0
    for giver in range(num_ranks):
        quotas_R = quotas_RR[giver]
        used_R = np.zeros(num_ranks, np.int64)
        while True:
            taker = quotas_R.argmax()
            if quotas_R[taker] <= 0:
                break
            if used_R[taker] == slots:
                quotas_R[taker] = 0
                continue
            expert = np.int64(-1)
            for e in range(num_experts):
                is_mine = home_E[e] == giver
                if is_mine and (expert < 0 or tokens_ER[e, giver] > tokens_ER[expert, giver]):
                    expert = np.int64(e)
            tokens = min(tokens_ER[expert, giver], quotas_R[taker])
            tokens_ER[expert, taker] += tokens
            tokens_ER[expert, giver] -= tokens
            quotas_R[taker] -= tokens
            used_R[taker] += 1
    return tokens_ER
