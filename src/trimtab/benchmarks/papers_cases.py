"""The cases of `trimtab bench papers`: models, ranks, tokens and routing, and their traces.

Weights and sharded training state of the models fit ranks of 80 GB with pipeline stages of 8 layers or fewer, so memory
is that of one stage with the 8 layers of the trace. Step time is that of all layers; pipelining is not simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from trimtab.cluster import ModelSpec, load_cluster, load_model
from trimtab.planner import SequenceCounts
from trimtab.simulator.comparison import ComparisonCase, budget_for
from trimtab.simulator.step import StepSettings
from trimtab.trace import PRESETS, synthesize_preset


class TraceKey(NamedTuple):
    """What a trace depends on. Cases with the same key share it."""

    preset: str
    experts: int
    top_k: int
    tokens: int
    seed: int


@dataclass(frozen=True)
class PapersCase:
    """One case.

    Attributes:
        model: name of a model preset; the trace has its experts and its `top_k`.
        ranks: of the expert-parallel group.
        tokens: of a step.
        preset: skew of the routing.
        slots: replica slots of a rank.
    """

    model: str
    ranks: int
    tokens: int
    preset: str
    slots: int

    @property
    def name(self) -> str:
        """Its name in tables, figures and `--only`, such as qwen3-30b-a3b-8-0.5M-qwen3-30b-math-s1."""
        return f"{self.model}-{self.ranks}-{self.tokens / 1e6:g}M-{self.preset}-s{self.slots}"

    def trace(self, seed: int) -> TraceKey:
        """The key of its trace."""
        model = load_model(self.model)
        return TraceKey(self.preset, model.num_experts, model.top_k, self.tokens, seed)


@dataclass(frozen=True)
class TraceSizes:
    """Sizes of all traces.

    Attributes:
        layers: sampled MoE layers, which represent all of the model.
        mean_length, max_length: tokens of a sequence.
        tokens_per_rank: mean tokens of a rank in a micro-step.
        steps: of a trace. The last one is simulated. Balancers that move homes start it from those that they reach by
            planning the earlier steps one after another, whose loads are the past loads.
    """

    layers: int = 8
    mean_length: int = 2048
    max_length: int = 8192
    tokens_per_rank: int = 8192
    steps: int = 3


def make_cases(
    pairs: tuple[tuple[str, int], ...], tokens: tuple[int, ...], presets: tuple[str, ...]
) -> list[PapersCase]:
    """Every pair of model and ranks with all tokens and presets; one slot and two slots alternate."""
    return [
        PapersCase(model, ranks, tokens[t], presets[p], 1 + (i + t + p) % 2)
        for i, (model, ranks) in enumerate(pairs)
        for t, p in product(range(len(tokens)), range(len(presets)))
    ]


def draw(key: TraceKey, sizes: TraceSizes) -> tuple[SequenceCounts, ...]:
    """Counted sequences of every step, in the order of steps. The expert ids are not kept."""
    trace = synthesize_preset(
        PRESETS[key.preset],
        num_sequences=max(1, key.tokens // sizes.mean_length),
        mean_length=sizes.mean_length,
        max_length=sizes.max_length,
        num_layers=sizes.layers,
        num_experts=key.experts,
        top_k=key.top_k,
        num_steps=sizes.steps,
        seed=key.seed,
    )
    counted = SequenceCounts.from_trace(trace)
    return tuple(counted.select(np.flatnonzero(trace.steps == step)) for step in range(sizes.steps))


def comparison_case(
    case: PapersCase, steps: tuple[SequenceCounts, ...], sizes: TraceSizes, cluster: str
) -> ComparisonCase:
    """The last of the steps with the model on a cluster, recomputed and checkpointed."""
    micro_steps = max(1, round(case.tokens / case.ranks / sizes.tokens_per_rank))
    return ComparisonCase(
        cluster=load_cluster(cluster, ranks=case.ranks, slots_per_rank=case.slots),
        model=load_model(case.model),
        sequences=steps[-1],
        earlier=steps[:-1],
        token_budget=budget_for(steps, case.ranks, micro_steps),
        settings=StepSettings(checkpointing=True),
    )


def pipeline_stage(model: ModelSpec, layers: int) -> ModelSpec:
    """The model with so many of its MoE layers, with embedding and output head, and without dense layers."""
    return replace(
        model,
        moe_layers=layers,
        moe_layer_indices=(),
        dense_layers=0,
        attention=(),
        attention_parameters=round(model.moe_attention.parameters),
    )
