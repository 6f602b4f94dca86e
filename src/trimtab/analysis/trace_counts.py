"""Token counts of micro-steps, from one pass over a trace of any length.

Packing depends on lengths only, so each sequence's micro-step is known before its expert ids are read. Each micro-step
is divided into 1, 2 or 4 *parts* of whole sequences. Counts are kept by part and summed for smaller or larger
micro-steps. Counts of shards are added: `plan_counts`, `count_shard` in any process, `merge`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner import budget_for, pack_by_length
from trimtab.trace import RoutingTrace, TraceReader
from trimtab.trace.counting import count_experts
from trimtab.trace.store import ChunkPlace, Source, read_chunks

DEFAULT_BUDGET = 8192
# Parts of a micro-step, if sequences are short enough.
PARTS = (4, 2, 1)
# Limit of counts: beyond it micro-steps are not divided, and then only the last steps are analyzed.
COUNT_BYTES = 64 << 20
# Domains with a line of their own; the smallest share one.
MOST_DOMAINS = 32
OTHERS = "all others"


@dataclass(frozen=True, eq=False)
class TraceCounts:
    """Token counts of a trace, in the micro-steps of its packed sequences.

    Attributes:
        counts_FLE: `[F, L, E]` int32, tokens by part of a micro-step, layer and expert. F = M * parts; micro-step m has
            the parts m * parts to (m + 1) * parts - 1.
        parts: number of parts of each micro-step.
        step_M: `[M]` int32, the RL step of each micro-step, ascending.
        counts_DLE: `[D, L, E]` int64, tokens by domain.
        domains: `[D]` names, most tokens first; one nameless domain where the trace has none.
        layer_indices: `[L]` the decoder layer behind each MoE layer.
        token_budget: most tokens of a rank in a micro-step.
        num_tokens, num_sequences: of the steps that were counted.
        unknown_routes: (token, layer) pairs without a recorded route.
        lengths: tokens of each sequence.
        top_k: experts of a token.
        model: the trace's name of the model.
        skipped_steps: the trace's first steps, left out because counts would not fit.
    """

    counts_FLE: Array
    parts: int
    step_M: Array
    counts_DLE: Array
    domains: tuple[str, ...]
    layer_indices: Array
    token_budget: int
    num_tokens: int
    num_sequences: int
    unknown_routes: int
    lengths: Array
    top_k: int
    model: str
    skipped_steps: int = 0

    @property
    def num_micro_steps(self) -> int:
        return len(self.step_M)

    @property
    def num_layers(self) -> int:
        return int(self.counts_FLE.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.counts_FLE.shape[2])

    @property
    def steps(self) -> list[int]:
        """The RL steps, ascending."""
        return np.unique(self.step_M).tolist()

    @property
    def counts_MLE(self) -> Array:
        """`[M, L, E]` int64, tokens by micro-step, layer and expert."""
        starts = np.arange(0, len(self.counts_FLE), self.parts)
        return summed(self.counts_FLE, starts, starts + self.parts)

    @property
    def step_starts(self) -> Array:
        """`[steps + 1]`: micro-steps `step_starts[i]:step_starts[i + 1]` are those of the i-th step."""
        return np.append(np.flatnonzero(np.diff(self.step_M, prepend=self.step_M[0] - 1)), len(self.step_M))


@dataclass(frozen=True, eq=False)
class CountPlan:
    """What each shard of a trace counts, decided from lengths, steps and domains alone. It can be pickled.

    Attributes:
        name, empty: of the trace, and the trace without its sequences.
        shards: the chunks that each shard reads; of a trace in memory a shard without any.
        place_S: `[S]` int64, part of a micro-step times domains + domain of each sequence; -1 if it is not counted.
        num_parts: F of `TraceCounts`.
        parts, step_M, domains, token_budget, lengths, skipped_steps: of `TraceCounts`.
    """

    name: str
    empty: RoutingTrace
    shards: tuple[tuple[ChunkPlace, ...], ...]
    place_S: Array
    num_parts: int
    parts: int
    step_M: Array
    domains: tuple[str, ...]
    token_budget: int
    lengths: Array
    skipped_steps: int


class ShardCounts(NamedTuple):
    """Token counts of a part of a trace: `counts_FLE` and `counts_DLE` as in `TraceCounts`."""

    counts_FLE: Array
    counts_DLE: Array


def plan_counts(
    trace: TraceReader | Source,
    *,
    ranks: int,
    token_budget: int | None = None,
    micro_steps: int | None = None,
    step: int | None = None,
    shards: int = 1,
) -> CountPlan:
    """Returns what to count, with every step packed as `trimtab plan` does. Reads everything but the ids.

    Args:
        trace: a reader; or a file, a folder, a pattern, or several of these.
        ranks: of the expert-parallel group.
        token_budget: most tokens of a rank in a micro-step; by default 8192, or the longest sequence if that is more.
        micro_steps: alternative to `token_budget`: the budget with which the largest step has about this many.
        step: analyze only this one.
        shards: most parts to count one by one; fewer if the trace has fewer chunks.

    Raises:
        InputError: if there is no such step, no token, or a sequence exceeds the budget.
    """
    reader = trace if isinstance(trace, TraceReader) else TraceReader(trace)
    facts, shape = reader.facts, reader.empty
    steps = np.unique(facts.steps[facts.lengths > 0])
    if not len(steps):
        raise InputError(f"{reader.name}: the trace is empty; there is nothing to analyze")
    if step is not None:
        if step not in steps:
            raise InputError(f"{reader.name}: no step {step} with tokens; it has steps {steps[0]} to {steps[-1]}")
        steps = np.array([step])
    lengths = [facts.lengths[facts.steps == each] for each in steps]
    budget = token_budget or max(DEFAULT_BUDGET, int(max(map(np.max, lengths))))
    if micro_steps is not None:
        budget = budget_for(lengths, ranks, micro_steps)
    micro_step_bytes = shape.num_layers * shape.num_experts * 4
    packed = [_pack(reader, each, ranks, budget) for each in steps]
    parts = _parts(packed, facts.lengths, ranks, budget, COUNT_BYTES // micro_step_bytes)
    kept = _kept_steps([count for _, _, count in packed], COUNT_BYTES // (micro_step_bytes * parts))
    skipped, packed, steps = len(steps) - kept, packed[-kept:], steps[-kept:]

    part_S = np.full(len(facts.lengths), -1, np.int64)
    first = 0
    for members, micro_step, count in packed:
        part_S[members] = (first + micro_step) * parts + _divide(micro_step, facts.lengths[members], parts)
        first += count
    counted = part_S >= 0
    domains, domain_S = _domains(facts.domains, facts.lengths, counted)
    return CountPlan(
        name=reader.name,
        empty=shape,
        shards=_shards(reader.chunk_places(), shards),
        place_S=np.where(counted, part_S * len(domains) + domain_S, -1),
        num_parts=first * parts,
        parts=parts,
        step_M=np.repeat(steps, [count for _, _, count in packed]),
        domains=domains,
        token_budget=budget,
        lengths=facts.lengths[counted],
        skipped_steps=skipped,
    )


def count_shard(plan: CountPlan, shard: int) -> ShardCounts:
    """Returns the counts of one shard, of `len(plan.shards)`, from its files. Peak memory is one chunk plus the counts.

    Raises:
        InputError: one line that names the file, if it is gone or damaged.
    """
    places = plan.shards[shard]
    counts = _no_counts(plan)
    for place, chunk in zip(places, read_chunks(places, plan.empty), strict=True):
        _add_chunk(plan, place.first, chunk, counts)
    return counts


def merge(plan: CountPlan, counts: Iterable[ShardCounts]) -> TraceCounts:
    """Returns the counts of the whole trace from those of all shards, in any order: sums of whole numbers.

    Raises:
        InputError: if there are more or fewer than the plan has shards, or no token has a known route.
    """
    total, merged = _no_counts(plan), 0
    for each in counts:
        total.counts_FLE[...] += each.counts_FLE
        total.counts_DLE[...] += each.counts_DLE
        merged += 1
    if merged != len(plan.shards):
        raise InputError(f"{plan.name}: counts of {merged} shards; the plan has {len(plan.shards)}")
    num_tokens, top_k = int(plan.lengths.sum()), plan.empty.top_k
    known = int(total.counts_DLE.sum()) // top_k
    if not known:
        raise InputError(f"{plan.name}: no token has a recorded route; there is nothing to analyze")
    return TraceCounts(
        counts_FLE=total.counts_FLE,
        parts=plan.parts,
        step_M=plan.step_M,
        counts_DLE=total.counts_DLE,
        domains=plan.domains,
        layer_indices=plan.empty.layer_indices,
        token_budget=plan.token_budget,
        num_tokens=num_tokens,
        num_sequences=len(plan.lengths),
        unknown_routes=num_tokens * plan.empty.num_layers - known,
        lengths=plan.lengths,
        top_k=top_k,
        model=plan.empty.model,
        skipped_steps=plan.skipped_steps,
    )


def count_trace(
    reader: TraceReader,
    *,
    ranks: int,
    token_budget: int | None = None,
    micro_steps: int | None = None,
    step: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TraceCounts:
    """Returns token counts of a trace, counted in this process: `plan_counts`, and one shard.

    Peak memory is one chunk plus the counts.

    Args:
        ranks, token_budget, micro_steps, step: as in `plan_counts`.
        progress: called with the number of sequences read and in total.

    Raises:
        InputError: as `plan_counts` and `merge`.
    """
    plan = plan_counts(reader, ranks=ranks, token_budget=token_budget, micro_steps=micro_steps, step=step)
    counts, row = _no_counts(plan), 0
    for chunk in reader.chunks():
        _add_chunk(plan, row, chunk, counts)
        row += chunk.num_sequences
        progress(row, len(plan.place_S))
    return merge(plan, [counts])


def _shards(places: list[ChunkPlace], most: int) -> tuple[tuple[ChunkPlace, ...], ...]:
    """Neighbouring chunks, in about equal numbers."""
    count = max(1, min(most, len(places)))
    edges = [len(places) * index // count for index in range(count + 1)]
    return tuple(tuple(places[start:end]) for start, end in pairwise(edges))


def _no_counts(plan: CountPlan) -> ShardCounts:
    layers, experts = plan.empty.num_layers, plan.empty.num_experts
    return ShardCounts(
        np.zeros((plan.num_parts, layers, experts), np.int32), np.zeros((len(plan.domains), layers, experts), np.int64)
    )


def _add_chunk(plan: CountPlan, first: int, chunk: RoutingTrace, counts: ShardCounts) -> None:
    """Add the tokens of a chunk, whose first sequence is `first` of the trace."""
    place_S = plan.place_S[first : first + chunk.num_sequences]
    wanted = np.flatnonzero(place_S >= 0)
    if not len(wanted):
        return
    places, group = np.unique(place_S[wanted], return_inverse=True)
    part = chunk if len(wanted) == chunk.num_sequences else chunk.select(wanted)
    for place, counts_LE in zip(places.tolist(), count_experts(part, group, len(places)), strict=True):
        counts.counts_FLE[place // len(plan.domains)] += counts_LE
        counts.counts_DLE[place % len(plan.domains)] += counts_LE


def summed(counts: Array, starts: Array, ends: Array) -> Array:
    """Sums `[G, ...]` int64 of `counts[start:end]` for each of G starts and ends."""
    sums = np.empty((len(starts), *counts.shape[1:]), np.int64)
    # One by one: `reduceat` to another type is several times slower.
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        counts[start:end].sum(axis=0, dtype=np.int64, out=sums[index])
    return sums


def _pack(reader: TraceReader, step: int, ranks: int, budget: int) -> tuple[Array, Array, int]:
    """Sequences of a step, the micro-step of each, and how many micro-steps there are."""
    members = np.flatnonzero(reader.facts.steps == step)
    schedule = pack_by_length(reader.facts.lengths[members], num_ranks=ranks, token_budget=budget)
    return members, schedule.micro_step, schedule.num_micro_steps


def _parts(packed: list[tuple[Array, Array, int]], lengths: Array, ranks: int, budget: int, most_parts: int) -> int:
    """Number of parts of each micro-step.

    The largest number for which every sequence fits into a part's share of the token budget, there is on average a
    sequence per rank and part, and counts fit into memory; else 1.
    """
    micro_steps = sum(count for _, _, count in packed)
    sequences = sum(len(members) for members, _, _ in packed)
    longest = max(int(lengths[members].max()) for members, _, _ in packed)
    return next(
        parts
        for parts in PARTS
        if parts == 1
        or (
            parts * longest <= budget and sequences >= parts * micro_steps * ranks and parts * micro_steps <= most_parts
        )
    )


def _kept_steps(micro_steps: list[int], most: int) -> int:
    """Number of last steps with at most this many micro-steps in total; at least one."""
    return max(1, int(np.count_nonzero(np.cumsum(micro_steps[::-1]) <= most)))


def _divide(micro_step: Array, lengths: Array, parts: int) -> Array:
    """A part `[S]` of its micro-step for each sequence: longest first, to the part with the fewest tokens."""
    part = np.zeros(len(lengths), np.int64)
    if parts == 1:
        return part
    filled = [[(0, index) for index in range(parts)] for _ in range(int(micro_step.max(initial=0)) + 1)]
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        part_heap = filled[micro_step[sequence]]
        tokens, index = part_heap[0]
        part[sequence] = index
        heapq.heapreplace(part_heap, (tokens + int(lengths[sequence]), index))
    return part


def _domains(names: Array, lengths: Array, chosen: Array) -> tuple[tuple[str, ...], Array]:
    """Domains, largest first, and the index `[S]` of each sequence's domain."""
    known, domain_S = np.unique(names, return_inverse=True)
    tokens = np.bincount(domain_S, np.where(chosen, lengths, 0), minlength=len(known))
    order = np.argsort(-tokens, kind="stable")[: np.count_nonzero(tokens)]
    number = np.full(len(known), min(len(order), MOST_DOMAINS) - 1)
    number[order[: MOST_DOMAINS - 1]] = np.arange(min(len(order), MOST_DOMAINS - 1))
    shown = [str(known[index]) for index in order[:MOST_DOMAINS]]
    if len(order) > MOST_DOMAINS:
        shown[-1] = OTHERS
    return tuple(shown), number[domain_S]
