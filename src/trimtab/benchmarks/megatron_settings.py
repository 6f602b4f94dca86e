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
        rehome: compare ways of moving experts over steps of drifting routing; see `bench_megatron_rehome`.
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
    rehome: bool = False

    def routings(self, ranks: int, rank: int) -> list[list[Array]]:
        """The ids `[n, L, K]` of each micro-batch of a rank: exactly even routing, then every skewed one."""
        skewed = [self._draw(ranks, rank, self.zipf, seed) for seed in range(min(self.seeds, self.pairs))]
        return [self._draw(ranks, rank, 0.0, 0), *skewed]

    def drifting(self, ranks: int, step: int) -> list[list[Array]]:
        """The ids `[n, L, K]` of each micro-batch, for every rank, in a step: skewed routing in which, from each step
        to the next, two experts of each layer exchange their popularity."""
        drift = np.random.default_rng(0)
        popular_LE = np.stack([drift.permutation(self.experts) for _ in range(self.layers)])
        for _ in range(step):
            for popular_E in popular_LE:
                first, second = drift.choice(self.experts, 2, replace=False)
                popular_E[[first, second]] = popular_E[[second, first]]
        # The trace's own order of popularity, as `synthesize` draws it.
        drawn = np.random.default_rng(step)
        place_LE = np.stack([np.argsort(drawn.permutation(self.experts)) for _ in range(self.layers)])
        layers = np.arange(self.layers)[:, None]
        return [
            [
                popular_LE[layers, place_LE[layers, ids]].astype(ids.dtype)
                for ids in self._draw(ranks, rank, self.zipf, step)
            ]
            for rank in range(ranks)
        ]

    def _draw(self, ranks: int, rank: int, zipf: float, seed: int) -> list[Array]:
        mine = self.micro_batches * self.sequences
        trace = synthesize(
            num_sequences=mine * ranks, sequence_length=self.sequence_length, num_layers=self.layers,
            num_experts=self.experts, top_k=self.top_k, zipf=zipf, seed=seed,
        )  # fmt: skip
        sequences = [trace.sequence(number) for number in range(rank * mine, (rank + 1) * mine)]
        return [np.concatenate(sequences[first : first + self.sequences]) for first in range(0, mine, self.sequences)]
