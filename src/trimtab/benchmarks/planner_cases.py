"""`PlannerCase`: a step of synthetic routing, the step before it, and a cluster, for all balancers to plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.planner import Placement, Schedule, SequenceCounts, Workload, pack_by_length, plan_sequences
from trimtab.policies import Policy, View, make_view
from trimtab.trace import PRESETS, synthesize_preset

RANKS_PER_NODE = 8
MICRO_STEPS = 8
TOKENS_PER_RANK = 4096
# At most a quarter of a rank's tokens, so that it has at least four sequences.
LONGEST = TOKENS_PER_RANK // 4
MEAN_LENGTH = 512
TOP_K = 8
# Token budget over the mean tokens per rank, as a fraction.
SLACK = 0.1
SMALLEST_SHARE = 128


@dataclass(frozen=True, eq=False)
class PlannerCase:
    """One case of the benchmark.

    Attributes:
        ranks, experts: sizes.
        preset: of the routing.
        sequences: of the step to plan.
        schedule: of the step, packed by length.
        workload_before: of the last step, packed by length.
        contiguous: contiguous homes.
        warm: the homes that Trimtab's plan of the last step leaves.
        token_budget: most tokens of a rank in a micro-step.
        mini_batch: `[S]` mini-batch of each sequence.
        past_counts_PLE: `[1, L, E]` int64, the last step's tokens by layer and expert.
    """

    ranks: int
    experts: int
    preset: str
    sequences: SequenceCounts
    schedule: Schedule
    workload_before: Workload
    contiguous: Placement
    warm: Placement
    token_budget: int
    mini_batch: Array
    past_counts_PLE: Array

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the case in figures."""
        return {"ranks": self.ranks, "experts": self.experts, "trace": self.preset}

    def cluster(self, slots: int) -> ClusterSpec:
        """The cluster with `slots` slots per rank."""
        return ClusterSpec(self.ranks, min(self.ranks, RANKS_PER_NODE), slots)

    def workload(self, schedule: Schedule) -> Workload:
        """The step's workload under a schedule."""
        return Workload.from_sequences(self.sequences, schedule)

    def view(self, policy: Policy, placement: Placement, slots: int, *, equal_terms: bool) -> View:
        """The input of a policy that starts from `placement`."""
        return make_view(
            policy,
            self.sequences,
            self.schedule,
            placement,
            self.cluster(slots),
            token_budget=self.token_budget,
            mini_batch=self.mini_batch,
            equal_terms=equal_terms,
            past_counts_PLE=self.past_counts_PLE,
        )


def build_case(ranks: int, experts: int, preset: str, *, layers: int, seed: int) -> PlannerCase:
    """Draw two steps of a preset: 8 micro-steps of 4,096 tokens per rank on average, at least 4 sequences each.

    In the spike preset every block of sequences is a mini-batch, so that every micro-step is one block.
    """
    per_step = ranks * MICRO_STEPS * TOKENS_PER_RANK // MEAN_LENGTH
    trace = synthesize_preset(
        PRESETS[preset],
        num_sequences=per_step,
        mean_length=MEAN_LENGTH,
        max_length=LONGEST,
        num_layers=layers,
        num_experts=experts,
        top_k=TOP_K,
        num_steps=2,
        seed=seed,
    )
    counted = SequenceCounts.from_trace(trace)
    before, sequences = (counted.select(np.flatnonzero(trace.steps == step)) for step in (0, 1))
    most = max(int(part.lengths.sum()) for part in (before, sequences))
    token_budget = math.ceil(most / (ranks * MICRO_STEPS) * (1 + SLACK))
    mini_batch = np.zeros(per_step, np.int64)
    if PRESETS[preset].spikes:
        mini_batch = np.arange(per_step) * MICRO_STEPS // per_step
        token_budget = math.ceil(token_budget * (1 + SLACK))
    contiguous = Placement.contiguous(layers, experts, ranks)
    cluster = ClusterSpec(ranks, min(ranks, RANKS_PER_NODE))
    planned = plan_sequences(before, contiguous, cluster, token_budget=token_budget, mini_batch=mini_batch)

    def packed(counts: SequenceCounts) -> Schedule:
        return pack_by_length(counts.lengths, num_ranks=ranks, token_budget=token_budget, mini_batch=mini_batch)

    return PlannerCase(
        ranks=ranks,
        experts=experts,
        preset=preset,
        sequences=sequences,
        schedule=packed(sequences),
        workload_before=Workload.from_sequences(before, packed(before)),
        contiguous=contiguous,
        warm=planned.placement,
        token_budget=token_budget,
        mini_batch=mini_batch,
        past_counts_PLE=before.counts_SLE.sum(axis=0, dtype=np.int64)[None],
    )
