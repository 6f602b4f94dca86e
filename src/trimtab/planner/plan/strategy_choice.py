"""Choice of a strategy by predicted seconds of the whole step.

Strategies are planned for a sample of the step, evenly spread over its layers and micro-steps. Everything that the step
waits for counts: rows, transfers, moves of homes, refreshing mirrors, and planning itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec
from trimtab.planner.plan.prediction import Prediction, closing_micro_steps, dense_times, group_parts, slowest
from trimtab.planner.plan.step_planning import PlannedLayers, StepPlanning
from trimtab.planner.plan.step_times import moving_seconds, refresh_seconds
from trimtab.planner.plan.strategy import ANY, NEAR, NONE, NOTHING, PAST, STAY, STEP, Strategy
from trimtab.planner.plan.workload import Workload
from trimtab.planner.replicas.paths import choose_paths
from trimtab.timeline import MIGRATION, PLANNING

SAMPLED_LAYERS, SAMPLED_MICRO_STEPS = 8, 4
# Tried for `Strategy.exposed` and `Strategy.sends`: even transfers of all ranks, up to twice as many of one, and few.
WAYS = ((0.02, 1), (0.02, 2), (0.4, 0))
# Of improved homes, see `Strategy.move_penalty`.
MOVE_PENALTY = 0.5
# The fewest slots are chosen with which a step takes so much longer at most than with any number.
SLOTS_WORTH = 0.005
_BETTER = Strategy(homes=STEP, move_penalty=MOVE_PENALTY)
# Parts of the time for which ranks wait for each other, of rows' time and of replicas' that better homes may save.
LESS_WAITING, LESS_DISPATCH, LESS_TRANSFERS = 0.3, 0.03, 0.8
# Experts in a mirror over the whole step are at most so many times those of a sample.
MORE_ENTRIES = 2.0
# Homes are good while they save this part of what new homes save. So many past steps are looked at; homes that would
# have stayed good since all of them are expected to do so for the second number of steps.
STILL_GOOD, PAST_STEPS, LONGEST_LIFE = 0.5, 8, 100.0
# Seconds of planning on one core, estimated from sizes, so that plans are the same on every machine: of an instance,
# for each rank and expert, on one node and on several, and for each slot where rows are split by links; and of
# improved homes of a layer, for each pair of experts.
PLACING_S, PLACING_ON_NODES_S, LINKS_S, SWAPPING_S = 8e-9, 4e-8, 2.5e-8, 1e-7
# Decisions compare whole nanoseconds, so that they don't depend on the order of summation.
NANOSECONDS = 1e9


class StrategyChoice(NamedTuple):
    """The chosen strategy, and what the sample tells of a whole step under it.

    Attributes:
        strategy: the chosen one.
        seconds: predicted seconds of a step by name of the strategy, the least first. Moves count in equal parts in the
            steps of their expected life.
        move_life: these steps.
        prediction: predicted time, with moves spread over the life of homes.
        max_vio_before, max_vio: max/mean - 1 of rank loads, mean over instances: without moves and replicas, and under
            the strategy.
        replicas: of an instance, mean.
        most_returns: most replicas of one home's experts in an instance.
    """

    strategy: Strategy
    seconds: dict[str, float]
    move_life: float
    prediction: Prediction
    max_vio_before: float
    max_vio: float
    replicas: float
    most_returns: int

    @property
    def saved_s(self) -> float:
        """Predicted seconds that it saves of a step."""
        return self.seconds[NOTHING.name] - self.prediction.seconds


def choose_strategy(planning: StepPlanning, *, may_move: bool) -> StrategyChoice:
    """The strategy with the least predicted time; doing nothing, if that saves less than `PlanSettings.least_gain`.

    Args:
        may_move: whether homes may change.
    """
    sample, cluster = _Sample(planning), planning.cluster
    found = sample.predict(_with_replicas(cluster))
    best = _least(found)
    if may_move and sample.moves_could_pay(found[best]):
        homes = [STEP] if planning.past_PLE is None else [STEP, PAST]
        # With better homes fewer replicas may be enough, or more may pay.
        numbers = [best.slots, best.slots // 2, 2 * best.slots]
        tried = [replace(best, slots=slots) for slots in numbers if 0 < slots <= cluster.slots_per_rank]
        # Experts of a group that are on one node need fewer transfers between nodes.
        has_groups = planning.costs.operations.expert_groups > 1 and cluster.nodes > 1
        for each, in_nodes in product(homes, (False, True) if has_groups else (False,)):
            found |= sample.predict(
                replace(strategy, homes=each, move_penalty=MOVE_PENALTY, in_nodes=in_nodes)
                for strategy in (*tried, NOTHING)
            )
    others = {strategy: found[strategy] for strategy in found if strategy != NOTHING and sample.keeps_to(strategy)}
    if sample.keeps_to(NOTHING):
        others = {strategy: others[strategy] for strategy in others if strategy.name not in planning.excluded}
    chosen = NOTHING
    if others:
        enough_s = (1 - planning.settings.least_gain) * found[NOTHING].seconds
        if found[_least(others)].seconds <= enough_s or not sample.keeps_to(NOTHING):
            chosen = _least(others)
    return sample.choice(chosen, found)


def predict_slots(planning: StepPlanning, numbers: Sequence[int]) -> dict[int, float]:
    """Predicted seconds of a step by numbers of slots of a rank, ascending; homes stay as they are."""
    cluster = replace(planning.cluster, slots_per_rank=numbers[-1])
    found = _Sample(replace(planning, cluster=cluster)).predict(_with_replicas(cluster))
    return {
        most: min(prediction.seconds for strategy, prediction in found.items() if strategy.slots <= most)
        for most in numbers
    }


def fewest_slots(seconds: Mapping[int, float]) -> int:
    """The fewest slots with which a step takes about as long as with any number, from seconds by numbers, ascending."""
    return next(slots for slots in seconds if seconds[slots] <= (1 + SLOTS_WORTH) * min(seconds.values()))


def _with_replicas(cluster: ClusterSpec) -> list[Strategy]:
    """Doing nothing, and replicas in up to the cluster's slots; in fewer too, so that more never make a step slower."""
    strategies = [NOTHING]
    for slots in _doubling(cluster.slots_per_rank) if cluster.ranks > 1 else []:
        strategies.append(Strategy(replicas=NEAR, slots=slots))
        if cluster.nodes > 1:
            strategies += [Strategy(replicas=ANY, slots=slots, exposed=exposed, sends=sends) for exposed, sends in WAYS]
    return strategies


def replicas_anywhere(cluster: ClusterSpec) -> Strategy:
    """The strategy with replicas wherever they help."""
    reach = ANY if cluster.nodes > 1 else NEAR
    return Strategy(replicas=reach, slots=cluster.slots_per_rank, exposed=WAYS[0][0])


def _doubling(most: int) -> list[int]:
    """1, 2, 4 and so on up to `most`, and `most` itself."""
    return sorted({min(1 << n, most) for n in range(most.bit_length() + 1)} - {0})


def _rounded(prediction: Prediction) -> int:
    return round(prediction.seconds * NANOSECONDS)


def _least(found: dict[Strategy, Prediction]) -> Strategy:
    """The strategy with the least predicted time, the first of equals."""
    return min(found, key=lambda strategy: _rounded(found[strategy]))


class _Sample:
    """Some layers and micro-steps of a step, and predictions for the whole step from them."""

    def __init__(self, planning: StepPlanning) -> None:
        self._planning = planning
        self._micro_steps = _spread(planning.micro_steps, SAMPLED_MICRO_STEPS)
        self._layers = _spread(planning.layers, SAMPLED_LAYERS)
        self._more_layers = len(planning.layers) / len(self._layers)
        self._exceeding: set[Strategy] = set()
        self._planned: dict[Strategy, PlannedLayers] = {}
        self._homes: dict[tuple[str, float, bool], list[Array]] = {}

    @cached_property
    def _counted(self) -> list[list[Workload]]:
        return self._planning.count(self._micro_steps, self._layers)

    @cached_property
    def _expert_counts(self) -> list[Array]:
        return self._planning.loads.expert_counts(self._micro_steps, self._layers)

    def predict(self, strategies: Iterable[Strategy]) -> dict[Strategy, Prediction]:
        """Predicted time of the whole step under each strategy, with the faster paths of weights."""
        found = {}
        for strategy in strategies:
            planned = self._planning.plan(
                strategy, self._micro_steps, self._layers, counted=self._counted, homes=self._homes_of(strategy)
            )
            ways = {strategy: self._prediction(strategy, planned)}
            if planned.num_replicas and self._planning.cluster.host_bytes_per_s:
                with_mirror = replace(strategy, mirror=True)
                ways[with_mirror] = self._prediction(with_mirror, planned)
            best = _least(ways)
            found[best] = ways[best]
            self._planned[best] = planned
            if not planned.keeps_limits:
                self._exceeding.add(best)
        return found

    def choice(self, strategy: Strategy, predicted: dict[Strategy, Prediction]) -> StrategyChoice:
        """What the sample tells of a strategy, one of those that were predicted."""
        seconds: dict[str, float] = {}
        for other in sorted(predicted, key=lambda other: (_rounded(predicted[other]), other.name)):
            seconds.setdefault(other.name, predicted[other].seconds)
        planned, nothing = self._planned[strategy], self._planned[NOTHING]
        ranks, returns_G = self._planning.cluster.ranks, []
        for table in planned.replicas:
            home_P = planned.home_LE[table.instances_P % len(planned.home_LE), table.experts]
            returns_G.append(int(np.bincount(table.instances_P * ranks + home_P, minlength=1).max()))
        most = max(self._planning.loads.gather(returns_G))
        instances = len(planned.figures) * len(self._micro_steps) * len(self._layers)
        return StrategyChoice(
            strategy, seconds, self.move_life if strategy.homes != STAY else 1.0, predicted[strategy],
            nothing.max_vio, planned.max_vio, planned.num_replicas / instances, most,
        )  # fmt: skip

    def keeps_to(self, strategy: Strategy) -> bool:
        """Whether the sample keeps to the limits of rows under a strategy."""
        return strategy not in self._exceeding

    def moves_could_pay(self, best: Prediction) -> bool:
        """Whether better homes could save more than their search and one move a layer over the busiest link cost."""
        planning, operations = self._planning, self._planning.costs.operations
        saved_s = LESS_WAITING * best.parts_s["imbalance"] + LESS_DISPATCH * best.parts_s["dispatch"]
        saved_s += LESS_TRANSFERS * best.parts_s["transfers"]
        move_s = operations.far_state_s if planning.cluster.nodes > 1 else operations.near_state_s
        cost_s = self._planning_seconds(Strategy(homes=STEP)) + len(planning.layers) * move_s / LONGEST_LIFE
        if saved_s <= cost_s:
            return False
        return saved_s > cost_s + len(planning.layers) * move_s * (1 / self.move_life - 1 / LONGEST_LIFE)

    @cached_property
    def move_life(self) -> float:
        """Steps that new homes are expected to stay good: for how many steps earlier homes would have.

        Homes for the loads of k steps ago were good until now if they save enough of what homes for this step's loads
        save. If those for all past steps were, the answer is `LONGEST_LIFE`. If loads have just changed, new ones are
        expected to last as long as those before.
        """
        planning = self._planning
        if planning.settings.move_life is not None:
            return planning.settings.move_life
        if planning.past_PLE is None or not len(planning.past_PLE):
            return 1.0
        past_PLE = planning.past_PLE[-PAST_STEPS:]
        stay = [planning.placement.home[layer] for layer in self._layers]
        best = self._homes_of(_BETTER)
        steps = self._steps_still_good(self._expert_counts, best, stay, past_PLE)
        # Compared with the homes of no plan, since those that stay may have been good for the steps before.
        first = [np.arange(len(home_E)) * planning.cluster.ranks // len(home_E) for home_E in stay]
        if steps == 0 and len(past_PLE) > 1 and not self._is_good(self._expert_counts, stay, best, first):
            last = [past_PLE[-1, layer][None] for layer in self._layers]
            best = planning.improved_homes(first, last, _BETTER)
            steps = 1 + min(self._steps_still_good(last, best, first, past_PLE[:-1]), len(past_PLE) - 1)
        # Homes for none of the past steps would have become bad, so no end is known.
        return LONGEST_LIFE if steps > len(past_PLE) else float(max(1, steps))

    def _steps_still_good(self, counts_L: list[Array], best: list[Array], without: list[Array], past_PLE: Array) -> int:
        """For how many of the last steps homes for their loads are still good for given loads, `[M, E]` of each layer;
        one more than there are if for all.

        Args:
            best: homes for the given loads.
            without: those that both are compared with.
        """
        for age, past_LE in enumerate(past_PLE[::-1]):
            past = [past_LE[layer][None] for layer in self._layers]
            if not self._is_good(counts_L, self._planning.improved_homes(without, past, _BETTER), best, without):
                return age
        return len(past_PLE) + 1

    def _is_good(self, counts_L: list[Array], homes: list[Array], best: list[Array], without: list[Array]) -> bool:
        """Whether homes save enough of what the best ones do."""
        bad = self._unevenness(counts_L, without)
        least = STILL_GOOD * (bad - self._unevenness(counts_L, best))
        return 0 < least <= bad - self._unevenness(counts_L, homes)

    def _unevenness(self, counts_L: list[Array], homes_L: list[Array]) -> float:
        """Squares of rank and node loads, summed over the sample: what better homes reduce."""
        cluster, total = self._planning.cluster, 0.0
        for counts_ME, home_E in zip(counts_L, homes_L, strict=True):
            loads_MR = np.stack([np.bincount(home_E, row_E, cluster.ranks) for row_E in counts_ME])
            loads_MN = loads_MR.reshape(len(loads_MR), cluster.nodes, -1).sum(axis=2)
            total += float(np.square(loads_MR).sum() + np.square(loads_MN).sum())
        return total

    def _homes_of(self, strategy: Strategy) -> list[Array]:
        """Homes of the sampled layers, which strategies share."""
        key = strategy.homes, strategy.move_penalty, strategy.in_nodes
        if key not in self._homes:
            if strategy.homes == STEP:
                stay = [self._planning.placement.home[layer] for layer in self._layers]
                self._homes[key] = self._planning.improved_homes(stay, self._expert_counts, strategy)
            else:
                self._homes[key] = self._planning.homes(strategy, self._micro_steps, self._layers)
        return self._homes[key]

    def _prediction(self, strategy: Strategy, planned: PlannedLayers) -> Prediction:
        planning, cluster = self._planning, self._planning.cluster
        operations = planning.costs.operations
        batches = planning.loads.schedules[0].mini_batch_of_micro_step
        closes_M = closing_micro_steps(batches)
        closing = closes_M[self._micro_steps]
        found: list[tuple[Array, float]] = []
        for replicas, work, dense in zip(planned.replicas, planned.works, self._dense_G, strict=True):
            paths_P = choose_paths(planned.home_LE, replicas, planning.cluster_of(strategy))
            parts_P = group_parts(
                work, replicas, paths_P, planned.home_LE, dense, closing, cluster.ranks_per_node, planning.costs
            )
            refresh_s = refresh_seconds(
                planned.home_LE, replicas, paths_P, cluster.ranks, cluster.ranks_per_node, operations
            )
            found.append((parts_P, refresh_s))
        found = planning.loads.gather(found)
        refresh_s = max(0.0, *(refresh_s for _, refresh_s in found))
        more_micro_steps = len(planning.micro_steps) / len(self._micro_steps)
        parts_P = slowest([parts_P for parts_P, _ in found]) * self._more_layers * more_micro_steps
        # A mirror holds the experts of all micro-steps, many of which have the same.
        refresh_s *= min(more_micro_steps, MORE_ENTRIES) * closes_M.sum()
        moving_s = moving_seconds(
            planning.placement.home[self._layers], planned.home_LE, cluster.ranks_per_node, operations
        )
        moving_s /= self.move_life if moving_s else 1.0
        parts_P[MIGRATION] += (refresh_s + moving_s) * self._more_layers
        parts_P[PLANNING] += self._planning_seconds(strategy)
        return Prediction.of(parts_P)

    @cached_property
    def _dense_G(self) -> list[tuple[Array, Array]]:
        """Dense parts of the sample by group; those outside layers in proportion to the layers."""
        planning, found = self._planning, []
        for group, schedule in enumerate(planning.loads.schedules):
            inside_MR, outside_MR = dense_times(schedule, planning.loads.lengths_of(group), planning.costs)
            found.append((inside_MR[self._micro_steps], outside_MR[self._micro_steps] / self._more_layers))
        return found

    def _planning_seconds(self, strategy: Strategy) -> float:
        """Estimated seconds of planning the whole step with a strategy."""
        planning = self._planning
        experts, layers = planning.placement.home.shape[1], len(planning.layers)
        seconds, cell_s = 0.0, PLACING_S
        if planning.cluster.nodes > 1:
            by_links = not planning.costs.operations.forwards
            cell_s = PLACING_ON_NODES_S + by_links * strategy.slots * LINKS_S
        if strategy.replicas != NONE and planning.sliced:
            # The first micro-step waits for its own, which the ranks plan together.
            seconds += cell_s * experts * layers * planning.cluster.planning_threads
        elif strategy.replicas != NONE:
            cells = planning.loads.num_groups * len(planning.micro_steps) * planning.cluster.ranks * experts
            seconds += cell_s * cells * layers
        if strategy.homes == STEP:
            seconds += SWAPPING_S * experts**2 * layers
        return seconds / planning.cluster.planning_threads


def _spread(values: Array, most: int) -> Array:
    """Up to `most` of the values, evenly spread."""
    number = min(most, len(values))
    return values[(np.arange(number) * 2 + 1) * len(values) // (2 * number)]
