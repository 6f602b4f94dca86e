"""`LiveBenchmark`: sizes of `trimtab bench live`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np

from trimtab.array_type import Array
from trimtab.calibration.small_model import HIDDEN, LAYERS, TOP_K, WIDTH
from trimtab.trace import synthesize


@dataclass(frozen=True)
class LiveBenchmark:
    """Sizes of the benchmark.

    Attributes:
        pairs: timed rounds of all variants.
        seeds: seeds 0 to seeds - 1, of the routing of stragglers and of steps. Rounds of steps use them in turn.
        json: file for the figures; None for none; `STDOUT` prints no tables.
        ranks: numbers of ranks of stragglers, each in one node.
        presets: skew of the routing of stragglers.
        experts, straggler_layers: of the routing of stragglers.
        gemm_instances: instances of each case whose matrix products are timed.
        gemm_hidden, gemm_width: sizes of the experts that are timed.
        slots: slots of a rank, of all policies but `feplb`.
        feplb_slots: dynamic experts of a rank, as published.
        tokens, sequence_length: tokens of a rank in a micro-step of the timed steps, and of a sequence.
        layers, step_experts, top_k, hidden, width: sizes of the model of the timed steps.
        zipf: exponent of the skewed routing of the timed steps, as in `MegatronBenchmark`.
    """

    pairs: int = 40
    seeds: int = 3
    json: Path | None = None
    ranks: tuple[int, ...] = (2, 4, 8)
    presets: tuple[str, ...] = ("qwen3-30b-math", "nemotron-3-nano-text")
    experts: int = 128
    straggler_layers: int = 4
    gemm_instances: int = 2
    gemm_hidden: int = 64
    gemm_width: int = 128
    slots: int = 2
    feplb_slots: int = 4
    tokens: int = 1024
    sequence_length: int = 256
    layers: int = LAYERS
    step_experts: int = 16
    top_k: int = TOP_K
    hidden: int = HIDDEN
    width: int = WIDTH
    zipf: float = 2.0

    @property
    def straggler_routings(self) -> list[tuple[int, str, int]]:
        """Number of ranks, preset and seed of every routing of stragglers."""
        return list(product(self.ranks, self.presets, range(self.seeds)))

    @cached_property
    def num_routings(self) -> int:
        """Skewed routings of the timed steps, at most one for each pair."""
        return min(self.seeds, self.pairs)

    def routing(self, ranks: int, rank: int, seed: int | None) -> list[Array]:
        """The ids `[n, L, K]` of two micro-steps of a rank, of the same skew; exactly even if `seed` is None."""
        mine = 2 * (self.tokens // self.sequence_length)
        trace = synthesize(
            num_sequences=mine * ranks, sequence_length=self.sequence_length, num_layers=self.layers,
            num_experts=self.step_experts, top_k=self.top_k, zipf=0.0 if seed is None else self.zipf, seed=seed or 0,
        )  # fmt: skip
        sequences = [trace.sequence(number) for number in range(rank * mine, (rank + 1) * mine)]
        return [np.concatenate(half) for half in (sequences[: mine // 2], sequences[mine // 2 :])]
