"""Sequences cut into the pieces that ranks of tensor and context parallelism have: pieces are scheduled one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimtab.planner import SequenceCounts
from trimtab.simulator.resampling import ResampledTrace
from trimtab.trace import RoutingTrace
from trimtab.trace.routing import windows_array


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
