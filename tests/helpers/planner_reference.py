"""Figures of the planner in plain Python, as docstrings describe them: counts, splits, and what searches minimise.

Searches have no second implementation here; tests compare their results with optima and bounds.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise, product

import numpy as np

from trimtab import Placement, Schedule, StepPlan, Workload
from trimtab.array_type import Array
from trimtab.planner import SequenceCounts
from trimtab.trace import RoutingTrace

Replica = tuple[int, int, int]
"""Expert, rank, tokens."""


def count_experts(trace: RoutingTrace, group_of_sequence: Array, num_groups: int) -> Array:
    """Counts `[G, L, E]`, one id at a time."""
    counts_GLE = np.zeros((num_groups, trace.num_layers, trace.num_experts), np.int64)
    for s, group in enumerate(group_of_sequence):
        for (_, layer, _), expert in np.ndenumerate(trace.sequence(s)):
            if expert != trace.no_route:
                counts_GLE[group, layer, expert] += 1
    return counts_GLE


def workload(sequences: SequenceCounts, schedule: Schedule) -> Workload:
    """The load of a schedule, one sequence at a time."""
    shape = (schedule.num_micro_steps, sequences.num_layers, schedule.num_ranks, sequences.num_experts)
    counts_MLRE = np.zeros(shape, np.int64)
    unknown_MLR = np.zeros(shape[:3], np.int64)
    for s, (micro_step, rank) in enumerate(zip(schedule.micro_step, schedule.rank, strict=True)):
        counts_MLRE[micro_step, :, rank, :] += sequences.counts_SLE[s]
        unknown_MLR[micro_step, :, rank] += sequences.unknown_SL[s]
    return Workload(counts_MLRE, unknown_MLR)


def expected_experts(workload: Workload) -> Array:
    """Unknown rows `[M, L, E]` at their estimated experts: shares of known rows plus one, cumulative sums cut off."""
    expected_MLE = np.zeros((workload.num_micro_steps, workload.num_layers, workload.num_experts), np.int64)
    for m, layer in np.ndindex(expected_MLE.shape[:2]):
        weights = [int(workload.token_counts_MLRE[:, layer, :, e].sum()) + 1 for e in range(workload.num_experts)]
        unknown = int(workload.unknown_MLR[m, layer].sum())
        ends = [Fraction(unknown * sum(weights[:e]), sum(weights)) for e in range(len(weights) + 1)]
        expected_MLE[m, layer] = [int(end) - int(start) for start, end in pairwise(ends)]
    return expected_MLE


def estimated(workload: Workload) -> Array:
    """Rows `[M, L, R, E]`, unknown ones estimated: each source takes its part of the experts' rows that are left."""
    counts_MLRE = workload.token_counts_MLRE.astype(np.int64)
    expected_MLE = expected_experts(workload)
    for m, layer in np.ndindex(expected_MLE.shape[:2]):
        left_E = expected_MLE[m, layer]
        for source, unknown in enumerate(workload.unknown_MLR[m, layer].tolist()):
            left = left_E.tolist()
            if unknown:
                ends = [int(Fraction(unknown * sum(left[:e]), sum(left))) for e in range(len(left) + 1)]
                left_E -= np.diff(ends)
                counts_MLRE[m, layer, source] += np.diff(ends)
        assert not left_E.any()
    return counts_MLRE


def _loads(counts_E: Array, fixed_R: Array, home_E: Array, replicas: list[Replica]) -> list[int]:
    loads = [int(rows) for rows in fixed_R]
    for expert, tokens in enumerate(counts_E):
        loads[home_E[expert]] += int(tokens)
    for expert, rank, tokens in replicas:
        loads[home_E[expert]] -= tokens
        loads[rank] += tokens
    return loads


def split_tokens(
    counts_RE: Array, home_E: Array, per_node: int, replicas: list[Replica]
) -> list[list[tuple[int, int]]]:
    """Quotas (source, tokens) of every replica: all copies take from their own rank, then all from their node, evenly.

    What is left of an expert's tokens then goes node by node, from the copy's own on, to its replicas in their order.
    """
    quotas: list[list[tuple[int, int]]] = [[] for _ in replicas]
    for expert in {e for e, _, _ in replicas}:
        mine = [p for p, (e, _, _) in enumerate(replicas) if e == expert]
        left = [int(tokens) for tokens in counts_RE[:, expert]]
        at_home = sum(left) - sum(replicas[p][2] for p in mine)
        ranks = [int(home_E[expert])] + [replicas[p][1] for p in mine]
        rooms = [at_home] + [replicas[p][2] for p in mine]
        taken = [[0] * len(left) for _ in ranks]

        def take(copy: int, sources: list[int], left: list[int] = left, rooms: list[int] = rooms) -> dict[int, int]:
            parts = evenly([left[source] for source in sources], rooms[copy])
            for source, part in zip(sources, parts, strict=True):
                left[source] -= part
                rooms[copy] -= part
            return dict(zip(sources, parts, strict=True))

        for copy, rank in enumerate(ranks):
            taken[copy][rank] = take(copy, [rank])[rank]
        for copy, rank in enumerate(ranks):
            for source, part in take(copy, _node(rank, per_node)).items():
                taken[copy][source] += part
        for copy, rank in list(enumerate(ranks))[1:]:
            order = _node(rank, per_node)
            for node in range(1, len(left) // per_node):
                others = _node((rank + node * per_node) % len(left), per_node)
                for source, part in take(copy, others).items():
                    taken[copy][source] += part
                order += others
            quotas[mine[copy - 1]] = [(source, taken[copy][source]) for source in order if taken[copy][source]]
    return quotas


def evenly(amounts: list[int], room: int) -> list[int]:
    """Parts of the amounts in proportion, `room` in all or everything; cumulative sums are rounded down."""
    total = sum(amounts)
    if not total:
        return [0] * len(amounts)
    ends = [int(Fraction(min(room, total) * sum(amounts[:i]), total)) for i in range(len(amounts) + 1)]
    return [end - start for start, end in pairwise(ends)]


def _node(rank: int, per_node: int) -> list[int]:
    """All ranks of a rank's node."""
    return list(range(rank // per_node * per_node, (rank // per_node + 1) * per_node))


def imbalance(counts_ME: Array, home_E: Array, num_ranks: int, per_node: int) -> int:
    """The sum of squared loads of ranks and of nodes over all micro-steps: what placement lowers."""
    total = 0
    for counts_E in counts_ME:
        loads = _loads(counts_E, np.zeros(num_ranks), home_E, [])
        nodes = [sum(loads[n : n + per_node]) for n in range(0, num_ranks, per_node)]
        total += sum(load * load for load in loads + nodes)
    return total


def price_of_a_move(counts_ME: Array, home_E: Array, num_ranks: int, per_node: int, move_penalty: float) -> int:
    """The part `move_penalty` of what the imbalance is above its least."""
    even = sum(int(counts_E.sum()) ** 2 for counts_E in counts_ME)
    least = Fraction(even, num_ranks) + Fraction(even * per_node, num_ranks)
    return round(Fraction(move_penalty) * (imbalance(counts_ME, home_E, num_ranks, per_node) - least))


def placement_cost(
    counts_ME: Array, home_E: Array, old_home_E: Array, num_ranks: int, per_node: int, price: int
) -> int:
    """What placement minimises: the imbalance and the price of every expert that is not at its old home."""
    moved = int(np.count_nonzero(home_E != old_home_E))
    return imbalance(counts_ME, home_E, num_ranks, per_node) + price * moved


def swapped(values: Array, i: int, j: int) -> Array:
    """A copy with two entries exchanged."""
    values = values.copy()
    values[[i, j]] = values[[j, i]]
    return values


def grouping_cost(
    sequences: SequenceCounts, schedule: Schedule, placement: Placement, groups: int, attention_rows: Array | None
) -> int:
    """Rows of the busiest rank of every instance of every group, and its busiest attention in every layer."""
    num_ranks = schedule.num_ranks // groups
    cost = 0
    for micro_step, group in product(range(schedule.num_micro_steps), range(groups)):
        members, part = schedule.of_group(group, num_ranks)
        here = members[part.micro_step == micro_step]
        for layer in range(sequences.num_layers):
            counts_E = sequences.counts_SLE[here, layer].sum(axis=0, dtype=np.int64)
            cost += max(_loads(counts_E, np.zeros(num_ranks), placement.home[layer], []))
        if attention_rows is not None:
            cost += sequences.num_layers * max(by_rank(schedule, here, attention_rows).values(), default=0)
    return cost


def by_rank(schedule: Schedule, members: Array, values_S: Array) -> dict[int, int]:
    """Sums of the members' values by data rank."""
    sums = Counter[int]()
    for s in members:
        sums[int(schedule.rank[s])] += int(values_S[s])
    return dict(sums)


def by_place(schedule: Schedule, values_S: Array) -> Array:
    """Sums `[M, R]` of sequences' values by micro-step and data rank."""
    sums_MR = np.zeros((schedule.num_micro_steps, schedule.num_ranks), np.int64)
    np.add.at(sums_MR, (schedule.micro_step, schedule.rank), values_S)
    return sums_MR


def rows_by_way(plan: StepPlan, workload: Workload) -> Counter[tuple[int, int, int, int]]:
    """Rows by (micro-step, layer, source rank, computing rank), every quota followed, the rest taken home.

    Unknown rows go where they are estimated.
    """
    ways = Counter[tuple[int, int, int, int]]()
    rows_MLRE = estimated(workload)
    for m, layer in product(range(plan.num_micro_steps), range(plan.num_layers)):
        left_RE = rows_MLRE[m, layer]
        for p in plan.replicas_of(m, layer):
            for q in range(plan.quota_starts[p], plan.quota_starts[p + 1]):
                source, tokens = int(plan.quota_sources[q]), int(plan.quota_tokens[q])
                left_RE[source, plan.replica_experts[p]] -= tokens
                ways[m, layer, source, int(plan.replica_ranks[p])] += tokens
        for (source, expert), tokens in np.ndenumerate(left_RE):
            ways[m, layer, source, int(plan.home[layer, expert])] += int(tokens)
    return ways


Link = tuple[str, int]
Costs = dict[str, float]
"""Of one replica over a link inside the node, between nodes and from host memory: `near`, `far`, `host`."""


def links(home: int, rank: int, path: int, per_node: int) -> list[tuple[Link, str]]:
    """The links that a replica's weights pass, each with the name of its cost."""
    if path == 1:
        return [(("from host", rank), "host")]
    kind = "near" if home // per_node == rank // per_node else "far"
    return [((f"{kind} out", home), kind), ((f"{kind} in", rank), kind)]


def busy(ends: list[tuple[int, int]], paths: list[int], per_node: int, costs: Costs) -> dict[Link, float]:
    """How long every link of an instance is busy; `ends` are homes and ranks of its replicas."""
    work: dict[Link, float] = {}
    for (home, rank), path in zip(ends, paths, strict=True):
        for link, cost in links(home, rank, path, per_node):
            work[link] = work.get(link, 0) + costs[cost]
    return work


def fit_mirrors(plan: StepPlan, room: int) -> list[int]:
    """A plan's paths when every node's mirror only keeps the `room` entries that serve most of its replicas."""
    places = {
        p: (int(plan.replica_ranks[p]) // plan.ranks_per_node, layer, int(plan.replica_experts[p]))
        for m, layer in product(range(plan.num_micro_steps), range(plan.num_layers))
        for p in plan.replicas_of(m, layer)
        if plan.replica_paths[p] == 1
    }
    served = Counter(places.values())
    kept = set()
    for node in range(plan.num_ranks // plan.ranks_per_node):
        mine = sorted((entry for entry in served if entry[0] == node), key=lambda entry: (-served[entry], entry))
        kept |= set(mine[:room])
    return [int(p in places and places[p] in kept) for p in range(plan.num_replicas)]
