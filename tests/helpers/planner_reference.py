"""The planner's kernels again in plain Python, as their docstrings describe them: slow, obvious, independent."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise, product

import numpy as np

from trimtab import Placement, Schedule, StepPlan, Workload
from trimtab.array_type import Array
from trimtab.planner import SequenceCounts
from trimtab.planner.replicas.replica_search import JITTER, MOST_RESTARTS, RESTART_WORK
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


def place_replicas(
    counts_E: Array, fixed_R: Array, home_E: Array, num_ranks: int, per_node: int, slots: int, threshold_load: int,
    smallest: int,
) -> list[Replica]:  # fmt: skip
    """Ask for the threshold; where that fails, search by halves for the lowest load that can be reached.

    Every load is asked for in four plain ways, then in others, whose order is jittered. At the threshold the cheapest
    replicas are kept, above it the first that reach the load. Fixed rows stay at their rank.
    """
    most = max(_loads(counts_E, fixed_R, home_E, []))
    threshold_load = max(threshold_load, int(fixed_R.max()))
    if most <= threshold_load or slots == 0:
        return []
    fewest = sum(_experts_to_share(counts_E[home_E == r], int(fixed_R[r]), threshold_load) for r in range(num_ranks))
    best, chosen = most, list[Replica]()
    low = target = threshold_load
    for step in range(6):
        for way in range(4 + min(MOST_RESTARTS, RESTART_WORK // num_ranks**2)):
            fill, near = way % 4 in (2, 3), way % 2 == 0
            if (not near and per_node == num_ranks) or (best <= target and way in (1, 2, 3)):
                continue
            jitter = _jitter(way - 4, max(num_ranks, len(counts_E)), target // JITTER)
            tried = _hand_over(counts_E, fixed_R, home_E, per_node, slots, target, smallest, fill, near, jitter)
            reached = max(_loads(counts_E, fixed_R, home_E, tried))
            if reached <= target:
                if best > target or _cost(tried, home_E, per_node) < _cost(chosen, home_E, per_node):
                    best, chosen = target, tried
            elif reached < best:
                best, chosen = reached, tried
            if best <= target and (len(chosen) <= fewest or step > 0):
                break
        low = target if best > target else low
        if best - low <= smallest // 8 or best <= threshold_load:
            break
        target = (low + best) // 2
    return _levelled(counts_E, fixed_R, home_E, smallest, chosen)


def _experts_to_share(counts_E: Array, fixed: int, threshold_load: int) -> int:
    """How many of a rank's experts, the largest first, hold what it has too much."""
    excess = fixed + int(counts_E.sum()) - threshold_load
    needed = 0
    for tokens in sorted(counts_E.tolist(), reverse=True):
        if excess > 0:
            needed, excess = needed + 1, excess - tokens
    return needed


def _jitter(number: int, length: int, most: int) -> list[int]:
    """Numbers up to `most`, from a xorshift generator; nothing for the plain ways, whose number is below 0."""
    if number < 0:
        return [0] * length
    bits, word = (number + 1) * 0x9E3779B97F4A7C15 % 2**64, 2**64 - 1
    jitter = []
    for _ in range(length):
        bits ^= bits << 13 & word
        bits ^= bits >> 7
        bits ^= bits << 17 & word
        jitter.append((bits >> 33) % (most + 1))
    return jitter


def _cost(replicas: list[Replica], home_E: Array, per_node: int) -> int:
    """A replica on its home's node costs 2, on another 3."""
    return sum(3 if home_E[expert] // per_node != rank // per_node else 2 for expert, rank, _ in replicas)


def _loads(counts_E: Array, fixed_R: Array, home_E: Array, replicas: list[Replica]) -> list[int]:
    loads = [int(rows) for rows in fixed_R]
    for expert, tokens in enumerate(counts_E):
        loads[home_E[expert]] += int(tokens)
    for expert, rank, tokens in replicas:
        loads[home_E[expert]] -= tokens
        loads[rank] += tokens
    return loads


def _hand_over(
    counts_E: Array, fixed_R: Array, home_E: Array, per_node: int, slots: int, target: int, smallest: int, fill: bool,
    near: bool, jitter: list[int],
) -> list[Replica]:  # fmt: skip
    """The busiest rank hands its largest expert to a taker, until nobody is above the target or nobody can help.

    Jitter, by rank and by expert among those of its rank, makes them seem busier than they are when one is chosen.
    """
    num_ranks = len(fixed_R)
    replicas: list[Replica] = []
    helpless: set[int] = set()
    while True:
        loads = _loads(counts_E, fixed_R, home_E, replicas)
        givers = [r for r in range(num_ranks) if loads[r] > target and r not in helpless]
        if not givers:
            return replicas
        giver = max(givers, key=lambda r: loads[r] + jitter[r])
        left = {int(e): int(counts_E[e]) for e in np.flatnonzero(home_E == giver)}
        for expert, _, tokens in replicas:
            if expert in left:
                left[expert] -= tokens
        seeming = {e: left[e] + jitter[i] for i, e in enumerate(left) if left[e] >= smallest}
        share = None
        if seeming:
            expert = max(seeming, key=seeming.__getitem__)
            copies = Counter(rank for _, rank, _ in replicas)
            has = {rank for e, rank, _ in replicas if e == expert} | {giver}
            takers = [r for r in range(num_ranks) if copies[r] < slots and r not in has]
            share = _share(left[expert], loads, takers, giver, per_node, target, smallest, fill, near, jitter)
        if share is None or share[1] < smallest:
            helpless.add(giver)
        else:
            replicas.append((expert, *share))


def _share(
    tokens: int, loads: list[int], takers: list[int], giver: int, per_node: int, target: int, smallest: int, fill: bool,
    near: bool, jitter: list[int],
) -> tuple[int, int] | None:  # fmt: skip
    """The taker and its tokens: whole excesses before parts, the own node before others.

    If `near`, a part on the own node comes before a whole excess on others, where the node has room for all its tokens.
    """
    excess = loads[giver] - target
    whole = max(min(excess, tokens), smallest)
    if tokens - whole < smallest:
        whole = tokens
    neighbours = [r for r in takers if r // per_node == giver // per_node]
    node_has_room = sum(load for r, load in enumerate(loads) if r // per_node == giver // per_node) <= target * per_node

    def seeming(rank: int) -> int:
        return loads[rank] + jitter[rank]

    def part(room: int) -> int:
        return tokens if room >= tokens else min(room, tokens - smallest)

    def all_to(ranks: list[int]) -> tuple[int, int] | None:
        fitting = [r for r in ranks if loads[r] + whole <= target]
        if not fitting:
            return None
        taker = max(fitting, key=seeming)
        return taker, max(whole, part(target - loads[taker])) if fill else whole

    def part_to(ranks: list[int]) -> tuple[int, int] | None:
        fitting = [r for r in ranks if loads[r] + smallest <= target]
        if not fitting:
            return None
        taker = min(fitting, key=seeming)
        return taker, part(min(excess, target - loads[taker]))

    return (
        all_to(neighbours)
        or (part_to(neighbours) if near and node_has_room else None)
        or all_to(takers)
        or part_to(takers)
    )


def _levelled(counts_E: Array, fixed_R: Array, home_E: Array, smallest: int, replicas: list[Replica]) -> list[Replica]:
    """Four times over all replicas: half the difference of the two ranks goes to the emptier one, as far as allowed."""
    replicas = list(replicas)
    for _ in range(4):
        for p, (expert, rank, tokens) in enumerate(replicas):
            at_home = int(counts_E[expert]) - sum(t for e, _, t in replicas if e == expert)
            if at_home > 0:
                loads = _loads(counts_E, fixed_R, home_E, replicas)
                moved = (loads[home_E[expert]] - loads[rank]) // 2
                moved = max(min(moved, at_home - smallest), smallest - tokens)
                replicas[p] = (expert, rank, tokens + moved)
    return replicas


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


def place_experts(counts_ME: Array, home_E: Array, num_ranks: int, per_node: int, move_penalty: float) -> Array:
    """Every expert in turn takes its best swap, its cost counted anew, until no expert has one."""
    price = price_of_a_move(counts_ME, home_E, num_ranks, per_node, move_penalty)
    old_home_E, home_E = home_E, home_E.copy()

    def cost(homes: Array) -> int:
        return placement_cost(counts_ME, homes, old_home_E, num_ranks, per_node, price)

    improved = True
    while improved:
        improved = False
        for e in range(len(home_E)):
            swaps = [swapped(home_E, e, f) for f in range(len(home_E)) if home_E[f] != home_E[e]]
            best = min(swaps, key=cost, default=home_E)
            if cost(best) < cost(home_E):
                home_E, improved = best, True
    return home_E


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


def choose_paths(ends: list[tuple[int, int]], per_node: int, costs: Costs) -> list[int]:
    """Paths (0 peer, 1 host) of one instance: where each replica is done first beside those that have a path."""
    chosen: dict[int, int] = {}
    for p in 2 * list(range(len(ends))):
        done = []
        for path in (0, 1):
            chosen[p] = path
            placed = sorted(chosen)
            work = busy([ends[o] for o in placed], [chosen[o] for o in placed], per_node, costs)
            done.append(max(work[link] for link, _ in links(*ends[p], path, per_node)))
        chosen[p] = int(done[1] < done[0])
    return [chosen[p] for p in range(len(ends))]


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
