"""Stragglers of balancers that choose from live counts, as in FEPLB's tables: in tokens, and in seconds of products.

The straggler of an instance is what the busiest rank has above the mean of all ranks; of several instances, the sum of
these divided by the sum of the means. A cut of 60% means that the rest is 40% of the straggler without balancing.

For the products, ranks run one after another on one thread; the time is the thread's CPU time, so that other processes
hardly change it. Each rank runs the experts of its homes, and then those of its replicas.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rich.progress import track

from trimtab.array_type import Array
from trimtab.benchmarks.live_choices import BEFORE, ChosenInstance, choose_all, slots_of
from trimtab.benchmarks.live_settings import LiveBenchmark
from trimtab.benchmarks.planner_cases import build_case
from trimtab.calibration.random_experts import random_experts, run_experts
from trimtab.cluster import QWEN3_30B, ModelSpec
from trimtab.runtime import RowGroups

# The least of so many times is used.
REPEATS = 3
# FEPLB's abstract and tables, over EP 2 to 8.
PUBLISHED = {"token_straggler_cut": (0.51, 0.70), "gemm_straggler_cut": (0.50, 0.68)}


def straggler_cases(settings: LiveBenchmark) -> list[dict[str, Any]]:
    """Figures by number of ranks, preset, seed and balancer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = []
    for ranks, preset, seed in track(settings.straggler_routings, "bench live: stragglers", transient=True):
        case = build_case(ranks, settings.experts, preset, layers=settings.straggler_layers, seed=seed)
        chosen = choose_all(case, settings)
        tokens = {name: straggler([each.computed_RE.sum(axis=1) for each in all_]) for name, all_ in chosen.items()}
        gemms = gemm_stragglers(chosen, settings)
        sent_before = _mean([each.sent_rows for each in chosen[BEFORE]])
        for name, instances in chosen.items():
            if name == BEFORE:
                continue
            found.append(
                {
                    "ranks": ranks,
                    "preset": preset,
                    "seed": seed,
                    "policy": name,
                    "slots": slots_of(name, settings),
                    "token_straggler_before": tokens[BEFORE],
                    "token_straggler": tokens[name],
                    "token_straggler_cut": 1 - tokens[name] / tokens[BEFORE],
                    "gemm_straggler_before": gemms[BEFORE],
                    "gemm_straggler": gemms[name],
                    "gemm_straggler_cut": 1 - gemms[name] / gemms[BEFORE],
                    **_traffic(instances, sent_before),
                }
            )
    torch.set_num_threads(threads)
    return found


def straggler(loads: Sequence[Array]) -> float:
    """What the busiest ranks have above the mean, as a part of the mean, over instances `[R]`."""
    return float(sum(load_R.max() - load_R.mean() for load_R in loads) / sum(load_R.mean() for load_R in loads))


def gemm_stragglers(chosen: Mapping[str, Sequence[ChosenInstance]], settings: LiveBenchmark) -> dict[str, float]:
    """Stragglers in CPU seconds of expert products, over some instances, the balancers in turn."""
    model = ModelSpec("bench-live", settings.experts, 1, settings.gemm_hidden, settings.gemm_width)
    stacks = random_experts(model, settings.experts, torch.float32, torch.device("cpu"))
    most = max(int(each.computed_RE.sum(axis=1).max()) for all_ in chosen.values() for each in all_)
    rows = torch.randn(most, settings.gemm_hidden)
    seconds: dict[str, list[Array]] = {name: [] for name in chosen}
    for sample in range(settings.gemm_instances):
        taken = {name: all_[sample * len(all_) // settings.gemm_instances] for name, all_ in chosen.items()}
        times = {name: np.full((REPEATS, len(each.counts_RE)), np.inf) for name, each in taken.items()}
        _rank_seconds(taken[BEFORE], stacks, rows)
        for repeat in range(REPEATS):
            for name, each in taken.items():
                times[name][repeat] = _rank_seconds(each, stacks, rows)
        for name, times_NR in times.items():
            seconds[name].append(times_NR.min(axis=0))
    return {name: straggler(loads) for name, loads in seconds.items()}


def _rank_seconds(instance: ChosenInstance, stacks: list[torch.Tensor], rows: torch.Tensor) -> Array:
    """CPU seconds `[R]` of each rank's products, the ranks one after another."""
    computed_RE = instance.computed_RE
    seconds_R = np.empty(len(computed_RE))
    for rank, computed_E in enumerate(computed_RE):
        at_home = instance.home_E == rank
        parts = [computed_E[at_home], computed_E[~at_home & (computed_E > 0)]]
        start = time.thread_time()
        for counts_G in parts:
            if len(counts_G):
                groups = RowGroups.on_host(counts_G)
                run_experts([stack[: len(counts_G)] for stack in stacks], rows[: counts_G.sum()], groups)
        seconds_R[rank] = time.thread_time() - start
    return seconds_R


def _traffic(instances: Sequence[ChosenInstance], sent_before: float) -> dict[str, float]:
    """What a forward of an instance sends in addition, of all ranks, with the sizes of Qwen3-30B-A3B in bf16: means.

    Returns:
        `replicas`, and `used_replicas`, those with rows; `weight_bytes` of all replicas; `row_bytes`, of rows in
        dispatch and combine, below 0 if fewer rows leave their rank than without balancing.
    """
    used = _mean([int(np.count_nonzero(each.replicas.quotas_PR.sum(axis=1))) for each in instances])
    replicas = _mean([each.replicas.count for each in instances])
    extra_rows = _mean([each.sent_rows for each in instances]) - sent_before
    row_bytes = QWEN3_30B.hidden_size * QWEN3_30B.weight_bytes
    return {
        "replicas": replicas,
        "used_replicas": used,
        "weight_bytes": replicas * QWEN3_30B.expert_bytes,
        "row_bytes": 2 * extra_rows * row_bytes,
    }


def summarise_cases(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each number of ranks and balancer: medians, least and greatest cuts over presets and seeds."""
    rows = []
    for ranks, policy in dict.fromkeys((case["ranks"], case["policy"]) for case in cases):
        mine = [case for case in cases if (case["ranks"], case["policy"]) == (ranks, policy)]
        row: dict[str, Any] = {"ranks": ranks, "policy": policy}
        for name in (
            "token_straggler_before", "token_straggler", "token_straggler_cut", "gemm_straggler_before",
            "gemm_straggler", "gemm_straggler_cut", "replicas", "weight_bytes", "row_bytes",
        ):  # fmt: skip
            row[name] = statistics.median(case[name] for case in mine)
        for name, (low, high) in PUBLISHED.items():
            values = [case[name] for case in mine]
            row[f"{name}_range"] = [min(values), max(values)]
            row[f"{name}_in_published_range"] = sum(low <= value <= high for value in values) / len(values)
        rows.append(row)
    return rows


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)
