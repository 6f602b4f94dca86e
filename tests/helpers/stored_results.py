"""Inputs and digests of results that are stored: they need no random numbers of numpy, which may change."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from trimtab.array_type import Array
from trimtab.planner import SequenceCounts
from trimtab.trace import PRESETS, synthesize_preset


def counted(
    skew: str, layers: int, experts: int, top_k: int, sequences: int, seed: int, scale: int, unknown: int,
    expert_groups: int = 1, groups_per_token: int = 1,
) -> SequenceCounts:  # fmt: skip
    """Synthetic sequences of about 40 tokens, each counted `scale` times.

    Args:
        unknown: in tenths, the part of every third sequence's tokens whose routes are unknown, in every second layer.
    """
    trace = synthesize_preset(
        PRESETS[skew], num_sequences=sequences, mean_length=40, max_length=120, num_layers=layers,
        num_experts=experts, top_k=top_k, seed=seed, expert_groups=expert_groups, groups_per_token=groups_per_token,
    )  # fmt: skip
    ids_TLK = trace.expert_ids.copy()
    for s in range(0, sequences, 3):
        rows = np.arange(trace.sequence_starts[s], trace.sequence_starts[s + 1])
        ids_TLK[rows[rows % 10 < unknown], ::2] = trace.no_route
    once = SequenceCounts.from_trace(replace(trace, expert_ids=ids_TLK))
    return SequenceCounts(
        once.counts_SLE.astype(np.int32) * scale, once.lengths * scale, (once.unknown_SL * scale).astype(np.int32)
    )


def digest(*arrays: Array) -> str:
    """Of integers and their shapes."""
    of_all = hashlib.blake2b(digest_size=6)
    for array in arrays:
        of_all.update(repr(array.shape).encode() + array.astype("<i8").tobytes())
    return of_all.hexdigest()
