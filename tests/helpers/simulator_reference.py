"""The simulator once more, slowly: every row by itself, links as fluids, ranks as chains of moments.

Nothing here is shared with `trimtab.simulator` but the values that go in. Where ranks meet, a moment remembers which
one it came from; the parts of a step are found at the end, by walking back from the last moment.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from helpers import planner_reference as reference
from helpers.reference_flows import needs_of
from trimtab import ClusterSpec, Placement, StepPlan, Workload
from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.policies import Traits
from trimtab.simulator.step import StepSettings

PARTS = ("attention", "dispatch", "experts", "imbalance", "transfers", "planning", "migration", "optimizer")
# Times that are nearer than this, relatively, may come out either way round.
NEAR = 1e-12


def pour(release: float, work: float, busy: Iterable[tuple[float, float]], spare: float) -> float:
    """When `work` seconds at the whole rate are done, if only `spare` of it is left while the link is busy.

    Steps from one change of the rate to the next.
    """
    spans = list(busy)
    changes = sorted({release, math.inf, *(edge for span in spans for edge in span if edge > release)})
    for start, end in pairwise(changes):
        rate = spare if any(s <= start < e for s, e in spans) else 1.0
        if work <= 0.0:
            return start
        if work <= rate * (end - start):
            return start + work / rate
        work -= rate * (end - start)
        if work <= NEAR * end:
            return end
    return release


class Copy(NamedTuple):
    """A replica whose weights travel."""

    expert: int
    rank: int
    home: int
    from_host: bool


@dataclass
class Lane:
    """One direction of one rank's link: transfers one after another, at what all-to-alls leave.

    Attributes:
        busy: the all-to-alls on the link; more are added.
        spare: the part of the link that these leave.
        waiting: of each transfer, from when on and how long alone.
    """

    busy: list[tuple[float, float]]
    spare: float
    waiting: list[tuple[float, float]] = field(default_factory=list)

    def done(self, number: int) -> float:
        """When a transfer, and all before it, are done, with the all-to-alls that are known now; 0 for number -1."""
        free = 0.0
        for release, work in self.waiting[: number + 1]:
            free = max(free, release)
            free = pour(free, work, self.busy, self.spare) if work > 0 else free
        return free


@dataclass(frozen=True)
class Transfer:
    """A transfer and its numbers on lanes, the first of which shows it."""

    release: float
    lanes: tuple[tuple[Lane, int], ...]

    @property
    def start(self) -> float:
        lane, number = self.lanes[0]
        return max(self.release, lane.done(number - 1))

    @property
    def end(self) -> float:
        return max(lane.done(number) for lane, number in self.lanes)


@dataclass(frozen=True, eq=False)
class Moment:
    """A rank's time so far, what the last stretch went to, and the moment before it, maybe another rank's."""

    time: float = 0.0
    spent: tuple[tuple[str, float], ...] = ()
    before: Moment | None = None

    def parts(self) -> dict[str, float]:
        """What all the time went to."""
        stretches: dict[str, list[float]] = {name: [] for name in PARTS}
        moment: Moment | None = self
        while moment is not None:
            for name, seconds in moment.spent:
                stretches[name].append(seconds)
            moment = moment.before
        return {name: math.fsum(found) for name, found in stretches.items()}


@dataclass(frozen=True)
class Shown:
    """An operation of the micro-step that is shown."""

    kind: str
    lane: str
    rank: int
    layer: int
    start: float
    end: float


def near_pairs(length: int, costs: OperationCosts) -> int:
    """Keys within reach of every query, twice, less one for the query itself; 0 without limited attention."""
    if not costs.reach:
        return 0
    keys = [query % costs.reach if costs.chunked else min(query, costs.reach) for query in range(length)]
    with_itself = [min(before + 1, costs.reach) for before in keys]
    return sum(keys) + sum(with_itself)


@dataclass
class ReferenceStep:
    """A simulated step. `ambiguous` if two ranks came last in a meeting, with other parts each."""

    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    shown: list[Shown] = field(default_factory=list)
    ambiguous: bool = False
    hidden: float = 0.0


class Simulation:
    """One run. Ranks are (group, rank in the group)."""

    def __init__(
        self, plan: StepPlan, workload: Workload, lengths: Array, costs: OperationCosts, cluster: ClusterSpec,
        traits: Traits, settings: StepSettings, before: Placement | None, show: int | None,
    ) -> None:  # fmt: skip
        self.plan, self.workload, self.costs, self.traits = plan, workload, costs, traits
        self.cluster, self.settings, self.before, self.show = cluster, settings, before, show
        self.groups = range(settings.groups)
        self.ranks = [(g, r) for g in self.groups for r in range(plan.num_ranks)]
        self.at = dict.fromkeys(self.ranks, Moment())
        self.lanes: dict[tuple[str, int, int], Lane] = {}
        # Transfers of the micro-step that is shown: kind, lane, rank, layer.
        self.drawn: list[tuple[str, str, tuple[int, int], int, Transfer]] = []
        self.calls: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
        self.taxes: dict[tuple[int, int], float] = defaultdict(float)
        self.result = ReferenceStep()
        self.is_shown = False
        self.lengths = lengths
        rows_MLRE = reference.estimated(workload)
        self.tokens, self.squares, self.near = (Counter[tuple[int, int]]() for _ in range(3))
        for m, r, length in zip(plan.micro_step.tolist(), plan.rank.tolist(), lengths.tolist(), strict=True):
            self.tokens[m, r] += length
            self.squares[m, r] += length**2
            self.near[m, r] += near_pairs(length, costs)
        self.needs = {
            (m, layer): needs_of(
                plan, rows_MLRE[m, layer], costs, m, layer, hops=traits.hops, even=traits.ideal
            )
            for m in range(plan.num_micro_steps)
            for layer in range(plan.num_layers)
        }  # fmt: skip
        has_links = cluster.node_bytes_per_s and cluster.network_bytes_per_s
        self.copies: dict[tuple[int, int], list[Copy]] = defaultdict(list)
        for m, layer in self.needs:
            for p in plan.replicas_of(m, layer):
                expert = int(plan.replica_experts[p])
                from_host = bool(plan.replica_paths[p]) and (traits.host_path or not has_links)
                copy = Copy(expert, int(plan.replica_ranks[p]), int(plan.home[layer, expert]), from_host)
                self.copies[m, layer].append(copy)
        is_kept = traits.copies == "layer slots"
        self.kept_copies = {
            layer: sorted({copy for m in range(plan.num_micro_steps) for copy in self.copies[m, layer] if is_kept})
            for layer in range(plan.num_layers)
        }

    # Time passes.

    def time(self, d: tuple[int, int]) -> float:
        return self.at[d].time

    def spend(self, d: tuple[int, int], seconds: float, **parts: float) -> None:
        moment = self.at[d]
        self.at[d] = Moment(moment.time + seconds, tuple(parts.items()), moment)

    def draw(self, kind: str, lane: str, d: tuple[int, int], layer: int, start: float, end: float) -> None:
        if self.is_shown and end > start:
            rank = d[0] * self.plan.num_ranks + d[1]
            self.result.shown.append(Shown(kind, lane, rank, layer, start, end))

    def group(self, g: int) -> list[tuple[int, int]]:
        return [(g, r) for r in range(self.plan.num_ranks)]

    def meet(self, who: list[tuple[int, int]]) -> None:
        last = max(who, key=self.time)
        close = [d for d in who if self.time(d) >= self.time(last) * (1 - NEAR) and self.at[d] is not self.at[last]]
        if close and not self.result.ambiguous:
            mine = self.at[last].parts()
            theirs = [self.at[d].parts() for d in close]
            self.result.ambiguous = any(
                abs(parts[name] - mine[name]) > NEAR * self.time(last) for parts in theirs for name in PARTS
            )
        for d in who:
            self.at[d] = self.at[last]

    def wait(self, d: tuple[int, int], until: float, layer: int) -> None:
        late = until - self.time(d)
        if late > 0:
            self.draw("waiting", "compute", d, layer, self.time(d), until)
            moment = self.at[d]
            self.at[d] = Moment(until, (("transfers", late),), moment)

    def compute(self, g: int, seconds: list[float], part: str, kind: str, layer: int) -> None:
        mean = sum(seconds) / len(seconds)
        for d, own in zip(self.group(g), seconds, strict=True):
            self.draw(kind, "compute", d, layer, self.time(d), self.time(d) + own)
            self.spend(d, own, **{part: mean, "imbalance": own - mean})

    def all_to_all(self, g: int, m: int, layer: int, kind: str) -> None:
        for d, need in zip(self.group(g), self.needs[m, layer], strict=True):
            start = self.time(d)
            self.calls["near", *d].append((start, start + need.near))
            self.calls["far", *d].append((start, start + need.far))
            self.draw(kind, "node link", d, layer, start, start + need.near)
            self.draw(kind, "network", d, layer, start, start + need.far)
            seconds = self.costs.dispatch_s + max(need.near, need.far)
            self.draw(kind, "compute", d, layer, start, start + seconds)
            self.spend(d, seconds, dispatch=seconds)

    # Transfers.

    def is_near(self, copy: Copy) -> bool:
        return copy.home // self.plan.ranks_per_node == copy.rank // self.plan.ranks_per_node

    def lane(self, what: str, link: str, direction: str, g: int, r: int) -> Lane:
        spare = {"near": self.costs.near_spare, "far": self.costs.far_spare, "host": 1.0}[link]
        busy = [] if link == "host" else self.calls[link, g, r]
        return self.lanes.setdefault((f"{what} {link} {direction}", g, r), Lane(busy, spare))

    def send(self, lanes: list[Lane], release: float, work: float) -> Transfer:
        for lane in lanes:
            lane.waiting.append((release, work))
        return Transfer(release, tuple((lane, len(lane.waiting) - 1) for lane in lanes))

    def bring(self, g: int, copies: list[Copy], since: dict[int, float], layer: int) -> dict[int, float]:
        """When ranks have the weights of all these copies; each is sent when both ranks have reached `since`."""
        there: dict[int, float] = defaultdict(float)
        costs = self.costs
        for copy in copies:
            link = "host" if copy.from_host else "near" if self.is_near(copy) else "far"
            work = {"host": costs.host_weights_s, "near": costs.near_weights_s, "far": costs.far_weights_s}[link]
            lanes, release = [self.lane("weights", link, "in", g, copy.rank)], since[copy.rank]
            if not copy.from_host:
                lanes.append(self.lane("weights", link, "out", g, copy.home))
                release = max(release, since[copy.home])
            transfer = self.send(lanes, release, work)
            for r in (copy.rank,) if copy.from_host else (copy.rank, copy.home):
                self.taxes[g, r] += costs.transfer_tax * work
            there[copy.rank] = max(there[copy.rank], transfer.end)
            if self.is_shown and work > 0:
                lane = {"host": "host link", "near": "node link", "far": "network"}[link]
                self.drawn.append(("weights", lane, (g, copy.rank), layer, transfer))
        return there

    def pay_tax(self, g: int, layer: int) -> None:
        """Transfers have taken time from compute, on each of their ranks."""
        for d in self.group(g):
            self.wait(d, self.time(d) + self.taxes.pop(d, 0.0), layer)

    def everywhere(self, time: float) -> dict[int, float]:
        return dict.fromkeys(range(self.plan.num_ranks), time)

    def new_weights(self, now: float) -> None:
        """Copies that stay may set out, layer by layer."""
        self.kept_from = self.everywhere(now)
        self.kept_by: dict[tuple[int, int], dict[int, float]] = {}

    def kept(self, g: int, layer: int) -> dict[int, float]:
        """When a layer's copies that stay are there. Found when it matters, with the all-to-alls till then."""
        if (g, layer) not in self.kept_by:
            self.kept_by[g, layer] = self.bring(g, self.kept_copies[layer], self.kept_from, layer)
        return self.kept_by[g, layer]

    def return_gradient(self, g: int, copy: Copy, layer: int, release: float) -> Transfer:
        link = "near" if self.is_near(copy) else "far"
        ends = (("out", copy.rank), ("in", copy.home))
        lanes = [self.lane("gradients", link, direction, g, r) for direction, r in ends]
        work = self.costs.near_gradient_s if link == "near" else self.costs.far_gradient_s
        transfer = self.send(lanes, release, work)
        for _, r in ends:
            self.taxes[g, r] += self.costs.transfer_tax * work
        if self.is_shown and work > 0:
            lane = "node link" if link == "near" else "network"
            self.drawn.append(("gradients", lane, (g, copy.rank), layer, transfer))
        return transfer

    def returned(self, d: tuple[int, int]) -> float:
        """When all gradients that a rank sends or gets have been moved."""
        mine = [lane for (name, *where), lane in self.lanes.items() if name.startswith("grad") and tuple(where) == d]
        return max((lane.done(len(lane.waiting) - 1) for lane in mine), default=0.0)

    # The step.

    def rounds(self) -> list[list[tuple[int, int, int, bool]]]:
        """Of every round (mini-batch, group, micro-step, is it the group's last of the mini-batch?)."""
        found, size = [], len(self.groups)
        batches = self.plan.mini_batch_of_micro_step.tolist()
        for batch in sorted(set(batches)):
            waiting = [m for m, of in enumerate(batches) if of == batch]
            mine = [list(enumerate(waiting[first : first + size])) for first in range(0, len(waiting), size)]
            last = {g: m for row in mine for g, m in row}
            found += [[(batch, g, m, last[g] == m) for g, m in row] for row in mine]
        return found

    def run(self) -> ReferenceStep:
        costs, traits = self.costs, self.traits
        # Tests charge the same time at every number of ranks.
        time = traits.planning.sizes[0] if traits.planning.sizes else None
        live = traits.known_at == "layer"
        beside_rollout, ahead, self.each_round = 0.0, 0.0, 0.0
        if time and traits.known_at == "step" and not traits.ideal:
            beside_rollout, ahead, self.each_round = self.planning_beside()
        self.live_planning = time.instance / 1e6 if time and live and not traits.ideal else 0.0
        refresh, moving = self.refresh_seconds(), self.moving_seconds()
        self.new_weights(0.0)
        rounds = self.rounds()
        planned_by = -moving
        for now in rounds:
            # While homes move, the first micro-steps are planned.
            planned_by += self.each_round
            for _, g, _, _ in now:
                for d in self.group(g):
                    late = max(0.0, planned_by - self.time(d))
                    self.spend(d, late, planning=late)
            self.forward(now)
        for number, now in enumerate(rounds):
            batch = now[0][0]
            if number and rounds[number - 1][0][0] != batch:
                self.new_weights(min(map(self.time, self.ranks)))
            self.is_shown = any(m == self.show for _, _, m, _ in now)
            origin = min(map(self.time, self.ranks))
            self.forward(now)
            if self.settings.checkpointing:
                planning, self.live_planning = self.live_planning, 0.0
                self.forward(now)
                self.live_planning = planning
            backward_began = max(map(self.time, self.ranks))
            self.backward(now)
            if self.is_shown:
                for kind, lane, d, layer, transfer in self.drawn:
                    self.draw(kind, lane, d, layer, transfer.start, transfer.end)
                self.result.shown = [
                    replace(op, start=op.start - origin, end=op.end - origin) for op in self.result.shown
                ]
            self.is_shown = False
            is_last = now is rounds[-1]
            if is_last or rounds[number + 1][0][0] != batch:
                for d in self.ranks:
                    self.wait(d, self.returned(d), -1)
                self.meet(self.ranks)
                took = self.time(self.ranks[0]) - backward_began
                optimizer = max(0.0, costs.reduce_s - took) + costs.optimizer_s
                again = 0.0 if is_last else refresh
                for d in self.ranks:
                    self.spend(d, optimizer + again, optimizer=optimizer, migration=again)
        end = self.at[self.ranks[0]]
        self.result.seconds = end.time + ahead + refresh + moving
        self.result.parts = end.parts()
        if traits.known_at == "step":
            late = self.result.parts["planning"]
            self.result.hidden = beside_rollout + len(rounds) * self.each_round - late
        self.result.parts["planning"] += ahead
        self.result.parts["migration"] += refresh + moving
        return self.result

    def planning_beside(self) -> tuple[float, float, float]:
        """Seconds during the rollout, before the step, and of each round during the step."""
        plan, planning = self.plan, self.traits.planning
        time, (message, byte) = planning.sizes[0], planning.exchange
        layers, threads = plan.num_layers, self.cluster.planning_threads
        rollout = time.choice / min(threads, 8)
        rollout += layers * (time.homes + plan.num_micro_steps * time.homes_instance) / threads
        routes = self.workload.num_rows / self.lengths.sum() * max(self.lengths.tolist())
        header = planning.route_us * routes
        header += plan.num_micro_steps * (time.schedule + layers * time.schedule_instance)
        # Ranks that have the header double with every message.
        reached = 1
        while reached < plan.num_ranks:
            reached *= 2
            header += message + byte * (8 * len(self.lengths) + 4 * plan.home.size)
        if time.instance == 0:
            return rollout / 1e6, header / 1e6, 0.0
        most = 0
        for m, layer in self.needs:
            copies = plan.replicas_of(m, layer)
            quotas = sum(int(plan.quota_starts[p + 1] - plan.quota_starts[p]) for p in copies)
            most = max(most, 12 * len(copies) + 6 * quotas)
        mine = math.ceil(layers / plan.num_ranks)
        each = mine * time.instance + layers * time.join + (plan.num_ranks - 1) * (message + byte * mine * most)
        return rollout / 1e6, header / 1e6, each / 1e6

    def dense(self, m: int, factor: float) -> tuple[list[float], list[float]]:
        """Seconds of ranks in a MoE layer's dense parts, and outside of MoE layers."""
        costs, inside, outside = self.costs, [], []
        for r in range(self.plan.num_ranks):
            tokens, squares, near = self.tokens[m, r], self.squares[m, r], self.near[m, r]
            layer_s = costs.layer_s + tokens * costs.token_s + squares * costs.square_s + near * costs.reach_s
            outer_s = costs.outer_s + tokens * costs.outer_token_s + squares * costs.outer_square_s
            inside.append(factor * layer_s)
            outside.append(factor * (outer_s + near * costs.outer_reach_s))
        return inside, outside

    def begin(self) -> None:
        self.began = {g: {r: self.time((g, r)) for g, r in self.group(g)} for g in self.groups}
        self.met: dict[int, list[float]] = {g: [] for g in self.groups}
        self.returning: dict[int, list[list[tuple[int, Transfer]]]] = {g: [] for g in self.groups}
        self.leaving: list[tuple[int, Copy, int, float]] = []

    def forward(self, now: list[tuple[int, int, int, bool]]) -> None:
        self.begin()
        for layer in range(self.plan.num_layers):
            if self.settings.meet == "layer":
                self.meet(self.ranks)
            for _, g, m, _ in now:
                self.compute(g, self.dense(m, 1.0)[0], "attention", "attention", layer)
                self.moe_forward(g, m, layer)
        for _, g, m, _ in now:
            self.compute(g, self.dense(m, 1.0)[1], "attention", "head", -1)

    def backward(self, now: list[tuple[int, int, int, bool]]) -> None:
        factor = self.costs.dense_backward
        self.begin()
        for _, g, m, _ in now:
            self.compute(g, self.dense(m, factor)[1], "attention", "head", -1)
        for layer in reversed(range(self.plan.num_layers)):
            if self.settings.meet == "layer":
                self.meet(self.ranks)
            for _, g, m, closes in now:
                self.moe_backward(g, m, layer, closes)
                self.compute(g, self.dense(m, factor)[0], "attention", "attention", layer)
        # By now it is known which all-to-alls they met.
        for g, copy, layer, ready in self.leaving:
            self.return_gradient(g, copy, layer, ready)
        for _, g, _, _ in now:
            self.pay_tax(g, -1)

    def travelling(self, m: int, layer: int) -> list[Copy]:
        """Copies that come for this instance alone."""
        return self.copies[m, layer] if self.traits.copies in ("shared slots", "unbounded") else []

    def since(self, g: int, places: int) -> dict[int, float]:
        """When there is a place for the instance whose ranks have just met: as one of `places` before it was done."""
        met = self.met[g]
        return self.began[g] if len(met) <= places else self.everywhere(met[-places])

    def moe_forward(self, g: int, m: int, layer: int) -> None:
        traits, group = self.traits, self.group(g)
        copies, live = self.travelling(m, layer), traits.transfers_start == "layer"
        if traits.hops == 1 and self.live_planning > 0:
            self.meet(group)
            for d in group:
                self.draw("planning", "CPU", d, layer, self.time(d), self.time(d) + self.live_planning)
                self.spend(d, self.live_planning, planning=self.live_planning)
        self.meet(group)
        now = self.time(group[0])
        if copies:
            self.met[g].append(now)
        since = self.everywhere(now) if live else self.since(g, self.settings.ring_layers)
        there: dict[int, float] = {}
        if traits.waits_for_weights:
            there = self.bring(g, copies, since, layer)
            for d in group:
                self.wait(d, there.get(d[1], 0.0), layer)
            self.meet(group)
        self.all_to_all(g, m, layer, "dispatch")
        release = 0.0
        if traits.hops == 2:
            # The home has its rows, and plans beside the experts that stay.
            arrived = max(map(self.time, group))
            release = arrived + self.live_planning
            self.draw("planning", "CPU", group[0], layer, arrived, release)
            since = self.everywhere(release)
        if not traits.waits_for_weights:
            there = self.bring(g, copies, since, layer)
        if traits.copies == "layer slots":
            there = self.kept(g, layer)
        self.pay_tax(g, layer)
        self.experts(g, m, layer, there, rows_move=release, factor=1.0)
        self.meet(group)
        self.all_to_all(g, m, layer, "combine")

    def moe_backward(self, g: int, m: int, layer: int, closes: bool) -> None:
        traits, group, places = self.traits, self.group(g), self.settings.ring_layers
        copies = self.travelling(m, layer)
        self.meet(group)
        there: dict[int, float] = {}
        number = len(self.met[g])
        if copies:
            self.met[g].append(self.time(group[0]))
        self.all_to_all(g, m, layer, "combine")
        if copies and traits.copies == "shared slots" and number >= places:
            # Planned by now, so a live balancer's weights come one layer ahead.
            ahead = 2 if traits.transfers_start == "layer" else places
            there = self.bring(g, copies, self.since(g, ahead), layer)
        if traits.copies == "layer slots":
            there = self.kept(g, layer)
        self.pay_tax(g, layer)
        self.experts(g, m, layer, there, rows_move=0.0, factor=self.costs.expert_backward)
        if closes and traits.copies == "layer slots":
            self.leaving += [(g, copy, layer, self.time((g, copy.rank))) for copy in self.kept_copies[layer]]
        if copies:
            if traits.copies == "shared slots" and number >= places:
                # The room for gradients is still taken by those of `places` instances before.
                for home, transfer in self.returning[g][number - places]:
                    self.wait((g, home), transfer.end, layer)
            sent = [
                (copy.home, self.return_gradient(g, copy, layer, self.time((g, copy.rank)))) for copy in copies
            ]  # fmt: skip
            self.returning[g].append(sent)
            self.pay_tax(g, layer)
        self.meet(group)
        self.all_to_all(g, m, layer, "dispatch")

    def experts(self, g: int, m: int, layer: int, there: dict[int, float], *, rows_move: float, factor: float) -> None:
        """Experts at home, and copies once their weights and rows are there."""
        needs, group = self.needs[m, layer], self.group(g)
        if self.traits.hops == 1:
            for d in group:
                self.wait(d, there.get(d[1], 0.0), layer)
            self.compute(g, [factor * need.experts for need in needs], "experts", "experts", layer)
            return
        mean = sum(factor * (need.experts + need.moved) for need in needs) / len(needs)
        for d, need in zip(group, needs, strict=True):
            began = self.time(d)
            stay, moved = factor * need.experts, factor * need.moved
            self.draw("experts", "compute", d, layer, began, began + stay)
            self.spend(d, stay, experts=mean, imbalance=stay + moved - mean)
            # Also who gets no rows waits until that is known.
            self.wait(d, rows_move, layer)
            if need.moved > 0:
                rows_are_here = max(began, rows_move) + need.hop
                self.wait(d, max(rows_are_here, there.get(d[1], 0.0)), layer)
                self.draw("experts", "compute", d, layer, self.time(d), self.time(d) + moved)
            # `imbalance` above is paid for here.
            self.spend(d, moved + need.hop, dispatch=need.hop)

    def refresh_seconds(self) -> float:
        """Each node's mirror holds once what its ranks take from it."""
        written: Counter[int] = Counter()
        sent: Counter[int] = Counter()
        per_node = self.plan.ranks_per_node
        copies = [(layer, copy) for (_, layer), copies in self.copies.items() for copy in copies if copy.from_host]
        for node, _, _, home in {(copy.rank // per_node, layer, copy.expert, copy.home) for layer, copy in copies}:
            (written if home // per_node == node else sent)[home] += 1
        far = self.costs.far_weights_s or self.costs.host_weights_s
        return max([0.0, *(n * self.costs.host_weights_s for n in written.values()), *(n * far for n in sent.values())])

    def moving_seconds(self) -> float:
        """Homes that move, all at once, over the links of ranks."""
        if self.before is None:
            return 0.0
        busy: dict[tuple[str, str, int], float] = defaultdict(float)
        per_node = self.plan.ranks_per_node
        for was, is_now in zip(self.before.home.ravel().tolist(), self.plan.home.ravel().tolist(), strict=True):
            if was != is_now:
                link = "near" if was // per_node == is_now // per_node else "far"
                seconds = self.costs.near_state_s if link == "near" else self.costs.far_state_s
                busy["out", link, was] += seconds
                busy["in", link, is_now] += seconds
        return max(busy.values(), default=0.0)


def simulate_reference(
    plan: StepPlan, workload: Workload, lengths: Array, costs: OperationCosts, cluster: ClusterSpec, traits: Traits,
    *, before: Placement | None = None, settings: StepSettings | None = None, show: int | None = None,
) -> ReferenceStep:  # fmt: skip
    """As `trimtab.simulator.step.simulate_step`."""
    chosen = settings or StepSettings()
    return Simulation(plan, workload, np.asarray(lengths), costs, cluster, traits, chosen, before, show).run()
