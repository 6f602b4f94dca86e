"""Measures that papers report of a balancer, computed from simulated steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.simulator.comparison import Outcome
from trimtab.simulator.comparison_case import ComparisonCase


@dataclass(frozen=True, eq=False)
class Case:
    """One step, and its simulation under every balancer."""

    case: ComparisonCase
    outcomes: Mapping[str, Outcome]


Measure = Callable[[Case], float]


def speedup(name: str, over: str, *, planning: bool = True) -> Measure:
    """Step time of `over` divided by that of `name`; `planning=False` excludes planning time from both."""

    def seconds(outcome: Outcome) -> float:
        hidden_s = 0.0 if planning else outcome.simulated.parts_s["planning"]
        return outcome.simulated.step_time_s - hidden_s

    return lambda case: seconds(case.outcomes[over]) / seconds(case.outcomes[name])


def gain(name: str, over: str) -> Measure:
    """Relative gain of `name` over `over` in steps per second."""
    ratio = speedup(name, over)
    return lambda case: ratio(case) - 1


def of_balanced(name: str, *, planning: bool = True) -> Measure:
    """Step time of the ideally balanced run divided by that of `name`."""
    return speedup(name, "balanced", planning=planning)


def max_over_mean(name: str) -> Measure:
    """max/mean of the rows that ranks compute, mean over instances."""
    return lambda case: case.outcomes[name].balance.mean


def share(name: str, part: str) -> Measure:
    """Fraction of the step time that one of `PARTS` takes."""
    return lambda case: case.outcomes[name].simulated.parts_s[part] / case.outcomes[name].simulated.step_time_s


def buffer(name: str) -> Measure:
    """Memory for replicas and their gradients, as a fraction of the parameters' memory, on the rank that needs most."""

    def fraction(case: Case) -> float:
        memory = case.outcomes[name].memory
        return memory["replica pool"] / (memory["expert parameters"] + memory["dense parameters"])

    return fraction


def straggler(load_MLR: Array) -> float:
    """Excess of the busiest rank over the mean, summed over instances."""
    return float((load_MLR.max(axis=-1) - load_MLR.mean(axis=-1)).sum())


def rows(outcome: Outcome) -> Array:
    """Rows `[M, L, R]` that every rank computes."""
    return outcome.simulated.work.loads_MLR


def product_seconds(outcome: Outcome) -> Array:
    """Forward seconds `[M, L, R]` of every rank in its experts' matrix products."""
    work = outcome.simulated.work
    return work.experts_MLR + work.moved_MLR


def straggler_cut(name: str, of: Callable[[Outcome], Array], over: str = "static") -> Measure:
    """Fraction of `over`'s straggler that `name` removes; negative if it adds to it."""
    return lambda case: 1 - straggler(of(case.outcomes[name])) / straggler(of(case.outcomes[over]))


def lost_in_layers(name: str) -> Measure:
    """Fraction of the MoE layers' forward time (dispatch, experts, combine) in which the mean rank waits for the matrix
    products of the busiest.
    """

    def lost(case: Case) -> float:
        outcome = case.outcomes[name]
        work, seconds_MLR = outcome.simulated.work, product_seconds(outcome)
        exchange_ML = case.case.cluster.dispatch_s + np.maximum(work.near_MLR, work.far_MLR).max(axis=-1)
        return straggler(seconds_MLR) / float((seconds_MLR.max(axis=-1) + 2 * exchange_ML).sum())

    return lost


def best_layer(name: str, over: str) -> Measure:
    """Largest ratio over instances of the busiest rank's matrix products under `over` and under `name`."""

    def ratio(case: Case) -> float:
        before_ML, after_ML = (product_seconds(case.outcomes[each]).max(axis=-1) for each in (over, name))
        return float((before_ML / after_ML).max())

    return ratio
