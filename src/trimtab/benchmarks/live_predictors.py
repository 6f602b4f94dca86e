"""How well each predictor of the live policy `predict` knows the next micro-step's replicas."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
from rich.progress import track

from trimtab.array_type import Array
from trimtab.benchmarks.live_choices import ChosenInstance, layers_of
from trimtab.benchmarks.live_settings import LiveBenchmark
from trimtab.benchmarks.live_stragglers import straggler
from trimtab.benchmarks.planner_cases import PlannerCase, build_case
from trimtab.planner import PlanSettings
from trimtab.runtime.live.balancer import LiveBalancer
from trimtab.runtime.live.choices import choose_quotas
from trimtab.runtime.live.policies import Predictor
from trimtab.runtime.rows.physical_experts import InstanceReplicas


def predictor_cases(settings: LiveBenchmark) -> list[dict[str, Any]]:
    """Figures by number of ranks, preset, seed and predictor.

    Returns:
        Of the second of two steps: `hit_rate`, the part of the predicted replicas whose expert also gets one from the
        micro-step's own counts; `used`, the part of them that gets rows; `token_straggler_cut`.
    """
    found = []
    for ranks, preset, seed in track(settings.straggler_routings, "bench live: predictors", transient=True):
        case = build_case(ranks, settings.experts, preset, layers=settings.straggler_layers, seed=seed)
        for predictor in get_args(Predictor):
            key = {"ranks": ranks, "preset": preset, "seed": seed, "predictor": predictor}
            found.append(key | figures_of(case, predictor, settings.slots))
    return found


def summarise_predictors(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Medians over presets and seeds, one row for each number of ranks and predictor."""
    rows = []
    for ranks, predictor in dict.fromkeys((case["ranks"], case["predictor"]) for case in cases):
        mine = [case for case in cases if (case["ranks"], case["predictor"]) == (ranks, predictor)]
        figures = {
            name: statistics.median(case[name] for case in mine) for name in ("hit_rate", "used", "token_straggler_cut")
        }
        rows.append({"ranks": ranks, "predictor": predictor} | figures)
    return rows


def figures_of(case: PlannerCase, predictor: Predictor, slots: int) -> dict[str, float]:
    """Figures of one predictor, of the second step of a case."""
    limits = PlanSettings().limits(case.cluster(slots))
    home_LE = case.contiguous.home
    balancer = LiveBalancer("predict", predictor, layers_of(home_LE), limits)
    measured_RS = np.zeros((case.ranks, 2), np.int64)
    for counts_LRE in case.workload_before.token_counts_MLRE.astype(np.int64):
        for layer, counts_RE in enumerate(counts_LRE):
            balancer.choose(layer, counts_RE, measured_RS)
    balancer.weights_changed()
    predicted = hits = used = 0
    before: list[Array] = []
    after: list[Array] = []
    for counts_LRE in case.workload(case.schedule).token_counts_MLRE.astype(np.int64):
        for layer, counts_RE in enumerate(counts_LRE):
            replicas = balancer.choose(layer, counts_RE, measured_RS).replicas
            known = choose_quotas(counts_RE, home_LE[layer], limits)
            predicted += replicas.count
            hits += int(np.isin(replicas.experts, known.experts).sum())
            used += int(np.count_nonzero(replicas.quotas_PR.sum(axis=1)))
            none = InstanceReplicas.none(case.ranks)
            for loads, each in ((before, none), (after, replicas)):
                loads.append(ChosenInstance(counts_RE, home_LE[layer], each).computed_RE.sum(axis=1))
    return {
        "hit_rate": hits / max(1, predicted),
        "used": used / max(1, predicted),
        "token_straggler_cut": 1 - straggler(after) / straggler(before),
    }
