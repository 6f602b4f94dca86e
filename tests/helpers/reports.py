"""Made-up reports of any size: plausible loads, and timelines in which ranks synchronise in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from trimtab.analysis import TraceCounts, analyze
from trimtab.analysis.trace_comparison import compare_traces
from trimtab.array_type import Array
from trimtab.report.comparison_report import ComparisonReport
from trimtab.report.model import AnalysisReport, LoadMap, PolicyResult, Report, Timeline
from trimtab.timeline.recorded_operations import LANES

KINDS = (
    "attention", "dispatch", "experts", "combine", "waiting for other ranks", "replica weights",
    "attention, backward", "dispatch, backward", "experts, backward", "combine, backward", "replica gradients",
)  # fmt: skip
EVIL = "</script><img src=x onerror=alert(1)>{{css}}\"'&"
"""A name from a user's file that must be escaped."""
COMPUTE, NODE_LINK, NETWORK, HOST_LINK, _ = range(len(LANES))
COLUMNS = ("kind_N", "lane_N", "rank_N", "layer_N", "start_N", "end_N")


def some_loads(rng: np.random.Generator, micro_steps: int, layers: int, ranks: int, skew: float) -> Array:
    """Tokens `[M, L, R]` of a few thousand a rank; hot ranks are much the same in all micro-steps of a layer."""
    habit = rng.lognormal(0, skew * rng.uniform(0.4, 1.2, (1, layers, 1)), (1, layers, ranks))
    loads = habit * rng.lognormal(0, skew / 2, (micro_steps, layers, ranks))
    return np.rint(4096 * loads / loads.mean(axis=2, keepdims=True)).astype(np.int64)


def some_timeline(title: str, loads_LR: Array, *, second: float = 2e-7, replicas: bool = True) -> Timeline:
    """Forward and backward of one micro-step: in each layer all ranks wait for the busiest."""
    layers, ranks = loads_LR.shape
    names = {name: kind for kind, name in enumerate(KINDS)}
    found: list[tuple[int, int, int, int, float, float]] = []

    def add(name: str, lane: int, layer: int, starts_R: Array, ends_R: Array) -> None:
        found.extend((names[name], lane, r, layer, float(starts_R[r]), float(ends_R[r])) for r in range(ranks))

    clock = np.zeros(ranks)
    for suffix, order, factor in (("", range(layers), 1.0), (", backward", range(layers - 1, -1, -1), 2.0)):
        for layer in order:
            work = loads_LR[layer] * second * factor
            even = float(work.mean())
            before, clock = clock, clock + 0.6 * even * np.linspace(0.97, 1.03, ranks)
            add(f"attention{suffix}", COMPUTE, layer, before, clock)
            if replicas:
                kind = "replica gradients" if suffix else "replica weights"
                add(kind, NETWORK if suffix else HOST_LINK, layer, before, before + 0.4 * even)
            for name in ("dispatch", "combine"):
                met = np.full(ranks, clock.max())
                add("waiting for other ranks", COMPUTE, layer, clock, met)
                add(f"{name}{suffix}", NODE_LINK, layer, met, met + 0.25 * even)
                clock = met + 0.25 * even
                if name == "dispatch":
                    before, clock = clock, clock + work
                    add(f"experts{suffix}", COMPUTE, layer, before, clock)
    columns = [np.array(column) for column in zip(*found, strict=True)]
    kind_N, lane_N, rank_N, layer_N, start_N, end_N = columns
    return Timeline(
        title, KINDS, kind_N.astype(np.uint8), lane_N.astype(np.uint8), rank_N.astype(np.int16),
        layer_N.astype(np.int16), start_N.astype(np.float64), end_N.astype(np.float64),
    )  # fmt: skip


def some_policies() -> tuple[PolicyResult, ...]:
    """Eight balancers with plausible figures; one of them has no parts."""
    rows = (
        ("static", "experts stay at home", 6.93, 1.83, 0.0, 0.0),
        ("eplb", "replicas from the last step's loads", 5.60, 1.41, 24.0, 0.08),
        ("llep", "spills the excess in chunks, after gating", 5.02, 1.16, 31.7, 0.55),
        ("ultraep", "quotas inside the node, after gating", 4.71, 1.12, 39.3, 0.42),
        ("relibra", "reorders between batches, replicates in the node", 4.32, 1.03, 35.1, 0.14),
        ("foremoe", "plans from the rollout's routing", 4.25, 1.02, 35.0, 0.09),
        ("trimtab", "schedule, homes, replicas and split from known routing", 4.08, 1.006, 40.7, 0.03),
        ("balanced", "tokens spread evenly, no transfers", 3.97, 1.0, 0.0, 0.0),
    )
    policies = []
    for name, about, time, ratio, replicas, exposed in rows:
        parts = {
            "experts": 1.6, "dispatch": 0.7, "imbalance": 1.6 * (ratio - 1), "transfers": exposed, "optimizer": 0.09,
            "planning": 0.2 if "after gating" in about else 0.0, "migration": 0.02 if name == "relibra" else 0.0,
        }  # fmt: skip
        parts["attention"] = time - sum(parts.values())
        memory = {"parameters": 11.2e9, "optimizer": 22.4e9, "activations": 9e9 * ratio}
        memory |= {"replica pool": 0.108e9} if replicas else {}
        policy = PolicyResult(name, about, time, 6.93 / time, 3.97 / time, ratio, parts, memory, replicas)
        policies.append(replace(policy, is_ideal=name == "balanced"))
    return tuple(policies)


def some_report(*, ranks: int = 8, layers: int = 4, micro_steps: int = 6, timelines: int = 2) -> Report:
    """A complete report, the same in every call."""
    rng = np.random.default_rng(0)
    before = some_loads(rng, micro_steps, layers, ranks, 0.35)
    after = some_loads(rng, micro_steps, layers, ranks, 0.006)
    runs = (("static", before), ("trimtab", after))
    return Report(
        title="Qwen3-30B-A3B, 64 ranks",
        answer="Trimtab makes this step 1.70 times as fast as static expert parallelism, and reaches 97.3% of a "
        "perfectly balanced run.",
        facts=(("trace", "qwen3-30b-mixed, seed 0"), ("model", "Qwen3-30B-A3B"), ("cluster", f"h100x8, {ranks} ranks")),
        policies=some_policies(),
        layer_names=tuple(str(layer) for layer in range(layers)),
        before=LoadMap("static", before),
        after=LoadMap("trimtab", after),
        timelines=tuple(
            some_timeline(f"{name}, micro-step 0", loads[0], replicas=name != "static")
            for name, loads in runs[:timelines]
        ),
        notes=("The trace is synthetic.", "Rivals are our reimplementations of their papers."),
    )


def crowded_report(**sizes: int) -> Report:
    """One timeline, in which every operation is there twice."""
    report = some_report(timelines=1, **sizes)
    first = report.timelines[0]
    twice: dict[str, Any] = {name: np.tile(getattr(first, name), 2) for name in COLUMNS}
    return replace(report, timelines=(replace(first, **twice),))


def edge_reports() -> dict[str, Report]:
    """Small and unusual reports."""
    usual = some_report()
    zero = np.zeros((1, 1, 1), np.int64)
    one = PolicyResult("static", "", 0.0, 1.0, None, 1.0, {}, {}, 0.0)
    bare = Report("t", "a", (), (one,), ("0",), LoadMap("before", zero), LoadMap("after", zero), ())
    first = usual.timelines[0]
    empty = replace(first, **{name: getattr(first, name)[:0] for name in COLUMNS})
    other = LoadMap("after", some_loads(np.random.default_rng(1), 3, 4, 8, 0.1))
    return {
        "one of everything, no load": bare,
        "nothing at all": replace(bare, policies=(), before=LoadMap("b", zero[:0]), after=LoadMap("a", zero[:0])),
        "one rank, one layer, one micro-step": some_report(ranks=1, layers=1, micro_steps=1),
        "256 ranks": some_report(ranks=256, layers=2, micro_steps=4, timelines=1),
        "other micro-steps after than before": replace(usual, after=other),
        "no operations": replace(usual, timelines=(empty,)),
        "figures that are none": replace(
            usual, policies=(replace(usual.policies[0], speedup=float("nan"), max_over_mean=float("inf")),)
        ),
    }


def some_analysis(
    *, micro_steps: int = 12, layers: int = 4, experts: int = 16, ranks: int = 4, steps: int = 2, without_load: int = 0,
    domains: tuple[str, ...] = ("maths", "code"), model: str = "some model", seed: int = 0,
) -> AnalysisReport:  # fmt: skip
    """An analysis of made-up counts, the same in every call with a seed; the first `without_load` micro-steps have no
    tokens."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(experts, 1.0), size=layers)
    counts = np.stack([rng.multinomial(4096, shares) for _ in range(micro_steps)]).astype(np.int32)
    counts[:without_load] = 0
    counted = TraceCounts(
        counts_FLE=counts, parts=1, step_M=np.arange(micro_steps) * steps // micro_steps,
        counts_DLE=rng.integers(0, 100, (len(domains), layers, experts)), domains=domains,
        layer_indices=np.arange(layers) + 1, token_budget=512, num_tokens=2048 * micro_steps, num_sequences=100,
        unknown_routes=3, lengths=np.array([1000]), top_k=2, model=model,
    )  # fmt: skip
    per_node = ranks if ranks % 2 else ranks // 2
    return AnalysisReport("trace.parquet", analyze(counted, ranks=ranks, ranks_per_node=per_node))


def some_comparison(name: str = "trace") -> ComparisonReport:
    """Two traces of models of this name, in files of this name; one is longer."""
    names = (f"{name}-a.parquet", f"{name}-b.parquet")
    first, second = some_analysis(model=name).analysis, some_analysis(model=name, micro_steps=5, seed=1).analysis
    return ComparisonReport(names, compare_traces(names, first, second))
