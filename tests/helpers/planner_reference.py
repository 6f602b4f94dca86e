"""Figures of the planner in plain Python, as docstrings describe them: counts, splits, and what searches minimise.

Searches have no second implementation here; tests compare their results with optima and bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate, pairwise, product

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
        expected_MLE[m, layer] = in_proportion(weights, int(workload.unknown_MLR[m, layer].sum()))
    return expected_MLE


def estimated(workload: Workload) -> Array:
    """Rows `[M, L, R, E]`, unknown ones estimated: each source takes its part of the experts' rows that are left."""
    counts_MLRE = workload.token_counts_MLRE.astype(np.int64)
    expected_MLE = expected_experts(workload)
    for m, layer in np.ndindex(expected_MLE.shape[:2]):
        left_E = expected_MLE[m, layer]
        for source, unknown in enumerate(workload.unknown_MLR[m, layer].tolist()):
            parts_E = np.array(in_proportion(left_E.tolist(), unknown))
            left_E -= parts_E
            counts_MLRE[m, layer, source] += parts_E
        assert not left_E.any()
    return counts_MLRE


def loads(counts_E: Array, home_E: Array, replicas: Iterable[Iterable[int]], fixed_R: Array) -> Array:
    """Rows `[R]` that each rank computes: fixed ones, and those of experts at home or of replicas elsewhere."""
    loads_R = fixed_R + np.bincount(home_E, counts_E, len(fixed_R)).astype(np.int64)
    for expert, rank, tokens in replicas:
        loads_R[home_E[expert]] -= tokens
        loads_R[rank] += tokens
    return loads_R


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
            here = [left[source] for source in sources]
            parts = in_proportion(here, min(rooms[copy], sum(here)))
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


def in_proportion(amounts: list[int], total: int) -> list[int]:
    """Parts of a total in proportion to the amounts, nothing if these are 0; cumulative sums are rounded down."""
    ends = [total * end // max(sum(amounts), 1) for end in accumulate(amounts, initial=0)]
    return [end - start for start, end in pairwise(ends)]


def _node(rank: int, per_node: int) -> list[int]:
    """All ranks of a rank's node."""
    return list(range(rank // per_node * per_node, (rank // per_node + 1) * per_node))


def imbalance(counts_ME: Array, home_E: Array, num_ranks: int, per_node: int) -> int:
    """The sum of squared loads of ranks and of nodes over all micro-steps: what placement lowers."""
    total = 0
    for counts_E in counts_ME:
        loads_R = loads(counts_E, home_E, [], np.zeros(num_ranks, np.int64))
        loads_N = loads_R.reshape(-1, per_node).sum(axis=1)
        total += sum(load * load for load in [*loads_R.tolist(), *loads_N.tolist()])
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
    counts_MRLE = np.zeros((schedule.num_micro_steps, schedule.num_ranks, *sequences.counts_SLE.shape[1:]), np.int64)
    np.add.at(counts_MRLE, (schedule.micro_step, schedule.rank), sequences.counts_SLE)
    cost = 0
    for part in np.split(counts_MRLE, groups, axis=1):
        for micro_step, layer in np.ndindex(len(part), sequences.num_layers):
            counts_E = part[micro_step, :, layer].sum(axis=0)
            cost += int(loads(counts_E, placement.home[layer], [], np.zeros(num_ranks, np.int64)).max())
    if attention_rows is not None:
        attention_MR = by_place(schedule, attention_rows)
        busiest = sum(part.max(axis=1).sum() for part in np.split(attention_MR, groups, axis=1))
        cost += sequences.num_layers * int(busiest)
    return cost


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


def rank_loads(plan: StepPlan, workload: Workload) -> Array:
    """Rows `[M, L, R]` that each rank computes, by `rows_by_way`."""
    loads_MLR = np.zeros(workload.token_counts_MLRE.shape[:3], np.int64)
    for (m, layer, _, rank), rows in rows_by_way(plan, workload).items():
        loads_MLR[m, layer, rank] += rows
    return loads_MLR


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
