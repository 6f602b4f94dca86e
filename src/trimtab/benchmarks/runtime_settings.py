"""`RuntimeBenchmark`: sizes of `trimtab bench runtime`, and the routing that they give."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.calibration.small_model import EXPERTS, HIDDEN, LAYERS, SEQUENCE_LENGTH, TOKENS, TOP_K, WIDTH, small_config
from trimtab.planner import Schedule, pack_by_length
from trimtab.trace import RoutingTrace, synthesize


@dataclass(frozen=True)
class RuntimeBenchmark:
    """Sizes of the benchmark.

    Attributes:
        tokens: tokens per rank.
        rounds: timed repetitions of every variant on every seed's routing.
        json: file for the figures; None for none; `STDOUT` prints no tables.
        ranks_per_node: neighbouring ranks that share a node.
        link_mbit: Mbit/s of the links between nodes, if they are limited. The links are set up elsewhere.
        seeds: skewed routings that are compared, of the seeds 0 to seeds - 1. Weights and tokens have seed 0.
        layers, experts, top_k, hidden, width: sizes of the model; `width` is that of an expert.
        slots: slots per rank.
        sequence_length: tokens of each sequence.
        zipf: exponent of the skewed routing.
        plans: folder for the plans of Trimtab's variants on seed 0's routing; None for none. With a folder no tables
            are printed.
    """

    tokens: int = TOKENS
    rounds: int = 5
    json: Path | None = None
    ranks_per_node: int = 2
    link_mbit: int | None = None
    seeds: int = 8
    layers: int = LAYERS
    experts: int = EXPERTS
    top_k: int = TOP_K
    hidden: int = HIDDEN
    width: int = WIDTH
    slots: int = 2
    sequence_length: int = SEQUENCE_LENGTH
    zipf: float = 1.2
    plans: Path | None = None

    @property
    def model_config(self) -> dict[str, Any]:
        """The model's config, as in a `config.json`."""
        return small_config(
            layers=self.layers, hidden=self.hidden, width=self.width, experts=self.experts, top_k=self.top_k
        )

    def draw(self, ranks: int, seed: int = 0) -> tuple[RoutingTrace, RoutingTrace, Schedule]:
        """Skewed and even routing of one micro-step on `ranks` ranks, and the schedule of either.

        Even routing is exactly even. It has seed 0, whatever the seed of the skewed routing.
        """
        draw = partial(
            synthesize,
            num_sequences=self.tokens // self.sequence_length * ranks,
            sequence_length=self.sequence_length,
            num_layers=self.layers,
            num_experts=self.experts,
            top_k=self.top_k,
        )
        skewed, even = draw(zipf=self.zipf, seed=seed), draw(zipf=0.0, seed=0)
        return skewed, even, pack_by_length(skewed.sequence_lengths, num_ranks=ranks, token_budget=self.tokens)
