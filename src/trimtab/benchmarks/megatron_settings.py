"""`MegatronBenchmark`: sizes of `trimtab bench megatron`, and the routing that they give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from trimtab.array_type import Array
from trimtab.trace import synthesize


@dataclass(frozen=True)
class MegatronBenchmark:
    """Sizes of the benchmark.

    Attributes:
        pairs: timed rounds of all variants.
        seeds: skewed routings, of the seeds 0 to seeds - 1, at most one for each pair. Rounds use them in turn.
        dispatcher: of planned Megatron; see `trimtab.integrations.megatron.balance`.
        json: file for the figures; None for none; `STDOUT` prints no tables.
        micro_batches: micro-batches of a step.
        sequences: sequences of a micro-batch on each rank.
        sequence_length: tokens of a sequence.
        layers, experts, top_k, hidden, width: sizes of the model; `width` is that of an expert.
        slots: slots per rank.
        zipf: exponent of the skewed routing. The load of two ranks differs less than that of many: an exponent of 2
            gives max/mean of 1.1 to 1.5 here, where 1.2 gives 1.7 to 2.1 with 128 experts, top-8, on 8 ranks.
    """

    pairs: int = 40
    seeds: int = 8
    dispatcher: Literal["megatron", "trimtab"] = "megatron"
    json: Path | None = None
    micro_batches: int = 2
    sequences: int = 4
    sequence_length: int = 512
    layers: int = 4
    experts: int = 16
    top_k: int = 4
    hidden: int = 256
    width: int = 512
    slots: int = 2
    zipf: float = 2.0

    def routings(self, ranks: int, rank: int) -> list[list[Array]]:
        """The ids `[n, L, K]` of each micro-batch of a rank: exactly even routing, then every skewed one."""
        skewed = [self._draw(ranks, rank, self.zipf, seed) for seed in range(min(self.seeds, self.pairs))]
        return [self._draw(ranks, rank, 0.0, 0), *skewed]

    def _draw(self, ranks: int, rank: int, zipf: float, seed: int) -> list[Array]:
        mine = self.micro_batches * self.sequences
        trace = synthesize(
            num_sequences=mine * ranks, sequence_length=self.sequence_length, num_layers=self.layers,
            num_experts=self.experts, top_k=self.top_k, zipf=zipf, seed=seed,
        )  # fmt: skip
        sequences = [trace.sequence(number) for number in range(rank * mine, (rank + 1) * mine)]
        return [np.concatenate(sequences[first : first + self.sequences]) for first in range(0, mine, self.sequences)]
