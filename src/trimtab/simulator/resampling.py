"""A recorded part of a step, scaled to the whole step: prompts are drawn with all their answers, with replacement.

Sequences are cut, where ranks of tensor and context parallelism share one: pieces are scheduled one by one.

A resampled step is more skewed than a real one, since it repeats the few recorded sequences. The excess is nearly
proportional to 1 / sequences, so steps drawn from half of the prompts have twice the excess: 2 f(all) - f(half) is
without it (the jackknife of Quenouille). Plans of a run, their hashes and training never see resampled steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.array_type import Array
from trimtab.planner import SequenceCounts
from trimtab.trace import RoutingTrace
from trimtab.trace.routing import windows_array

# With fewer sequences in a step the skew of a whole step can't be told from chance.
LEAST_SEQUENCES = 48


@dataclass(frozen=True, eq=False)
class ResampledTrace:
    """Sequences of a trace in another order, some of them several times; ids are not copied.

    Attributes:
        trace: the recorded sequences.
        index_S: `[S]` int64, the sequence of the trace behind each sequence.
    """

    trace: RoutingTrace
    index_S: Array

    @property
    def expert_ids(self) -> Array:
        """Those of the trace, `[T, L, K]`."""
        return self.trace.expert_ids

    @property
    def sequence_starts(self) -> Array:
        """Those of the trace."""
        return self.trace.sequence_starts


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """The recorded sequences of one step.

    Attributes:
        counts: routing by sequence.
        trace: their tokens.
        tokens: of the whole step.
    """

    counts: SequenceCounts
    trace: RoutingTrace
    tokens: int

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return self.tokens <= int(self.counts.lengths.sum())

    def prompts(self) -> list[Array]:
        """Indices of the sequences of each prompt. A sequence whose prompt is unknown is alone."""
        hashes = self.trace.prompt_hashes
        alone = np.flatnonzero(hashes == 0)
        order = np.argsort(hashes, kind="stable")[len(alone) :]
        known = np.split(order, np.flatnonzero(np.diff(hashes[order])) + 1) if len(order) else []
        return [*alone[:, None], *known]


def resample(step: RecordedStep, prompts: Sequence[Array], rng: np.random.Generator) -> Array:
    """Sequences `[S]` int64 of a whole step, drawn from some of its prompts: all answers of a prompt, or none.

    The step has its number of tokens, to within half of the last prompt's.
    """
    tokens_P = np.array([step.counts.lengths[prompt].sum() for prompt in prompts], np.int64)
    mean = max(1.0, float(tokens_P.mean()))
    drawn = np.zeros(0, np.int64)
    while tokens_P[drawn].sum() < step.tokens:
        more = max(16, int((step.tokens - tokens_P[drawn].sum()) / mean * 1.1))
        drawn = np.concatenate([drawn, rng.integers(len(prompts), size=more)])
        if not tokens_P.any():
            break
    sums = np.cumsum(tokens_P[drawn])
    end = int(np.searchsorted(sums, step.tokens))
    before = sums[end - 1] if end else 0
    # The nearer of the two numbers of prompts, but not none.
    count = end if end and step.tokens - before <= sums[min(end, len(sums) - 1)] - step.tokens else end + 1
    return np.concatenate([prompts[prompt] for prompt in drawn[:count]]).astype(np.int64)


def whole_steps(
    steps: Sequence[RecordedStep], seed: int, *, half: int | None = None
) -> list[tuple[SequenceCounts, ResampledTrace]]:
    """Each step with its number of tokens.

    Args:
        steps: the same step twice is drawn twice.
        half: 0 or 1: draw from this half of the prompts alone; None: from all. With the same seed no prompt is in both.
    """
    made = []
    for number, step in enumerate(steps):
        prompts = step.prompts()
        order = np.random.default_rng([seed, steps.index(step)]).permutation(len(prompts))
        if half is not None and len(prompts) > 1:
            order = order[half::2]
        rng = np.random.default_rng([seed, number, 0 if half is None else 1 + half])
        index_S = resample(step, [prompts[place] for place in order], rng)
        made.append((step.counts.select(index_S), ResampledTrace(step.trace, index_S)))
    return made


def cut_trace(trace: RoutingTrace, pieces: int) -> RoutingTrace:
    """The same tokens, with each sequence as so many sequences of neighbouring tokens and nearly the same length."""
    starts = trace.sequence_starts[:-1, None] + trace.sequence_lengths[:, None] * np.arange(pieces) // pieces
    return replace(
        trace,
        sequence_starts=np.append(starts.ravel(), trace.sequence_starts[-1]).astype(np.int64),
        prompt_lengths=np.repeat(trace.prompt_lengths, pieces),
        steps=np.repeat(trace.steps, pieces),
        sequence_hashes=np.repeat(trace.sequence_hashes, pieces),
        prompt_hashes=np.repeat(trace.prompt_hashes, pieces),
        domains=np.repeat(trace.domains, pieces),
        windows=windows_array([()] * (pieces * trace.num_sequences)),
    )


def cut_step(
    counts: SequenceCounts, trace: RoutingTrace | ResampledTrace, pieces: int
) -> tuple[SequenceCounts, RoutingTrace | ResampledTrace]:
    """A step of S sequences with `pieces * S`, those of a sequence next to each other."""
    if pieces == 1:
        return counts, trace
    if isinstance(trace, RoutingTrace):
        cut = cut_trace(trace, pieces)
        return SequenceCounts.from_trace(cut), cut
    cut = cut_trace(trace.trace, pieces)
    index_S = (trace.index_S[:, None] * pieces + np.arange(pieces)).ravel()
    return SequenceCounts.from_trace(cut).select(index_S), ResampledTrace(cut, index_S)
