"""The situations that planners are compared in: a step of synthetic routing, the step before it, and a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.planner import Placement, Schedule, SequenceCounts, Workload, pack_by_length, plan_sequences
from trimtab.trace import PRESETS, synthesize_preset

RANKS_PER_NODE = 8
MICRO_STEPS = 8
TOKENS_PER_RANK = 4096
# At most a quarter of a rank's tokens, so that it has at least four sequences.
LONGEST = TOKENS_PER_RANK // 4
MEAN_LENGTH = 512
TOP_K = 8
# Room over the average that packing gets, as a part of it.
SLACK = 0.1


@dataclass(frozen=True, eq=False)
class PlannerCase:
    """One case of the benchmark.

    Attributes:
        sequences: of the step to plan.
        schedule: packed by length.
        contiguous, warm: the usual homes, and those that Trimtab's plan of the last step leaves behind.
        mini_batch: `[S]` mini-batch of each sequence.
        past_counts_PLE: `[1, L, E]` int64, the last step's tokens by layer and expert.
    """

    ranks: int
    experts: int
    preset: str
    sequences: SequenceCounts
    schedule: Schedule
    contiguous: Placement
    warm: Placement
    token_budget: int
    mini_batch: Array
    past_counts_PLE: Array

    def cluster(self, slots: int) -> ClusterSpec:
        return ClusterSpec(self.ranks, min(self.ranks, RANKS_PER_NODE), slots)

    def workload(self, schedule: Schedule) -> Workload:
        return Workload.from_sequences(self.sequences, schedule)


def build_case(ranks: int, experts: int, preset: str, *, layers: int, seed: int) -> PlannerCase:
    """Draw two steps of a preset: 8 micro-steps of 4,096 tokens a rank on average, at least 4 sequences each.

    The blocks of the spike preset are mini-batches of their own, so that every micro-step is one block.
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
    warm = plan_sequences(
        before,
        contiguous,
        ClusterSpec(ranks, min(ranks, RANKS_PER_NODE)),
        token_budget=token_budget,
        mini_batch=mini_batch,
    ).placement
    return PlannerCase(
        ranks=ranks,
        experts=experts,
        preset=preset,
        sequences=sequences,
        schedule=pack_by_length(sequences.lengths, num_ranks=ranks, token_budget=token_budget, mini_batch=mini_batch),
        contiguous=contiguous,
        warm=warm,
        token_budget=token_budget,
        mini_batch=mini_batch,
        past_counts_PLE=before.counts_SLE.sum(axis=0, dtype=np.int64)[None],
    )
