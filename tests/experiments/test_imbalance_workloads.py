"""Workloads W0 to W7 isolate what their names say, and the page shows the stored figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trimtab
from experiments import imbalance_workloads
from experiments.imbalance_workloads import RESULTS, WORKLOADS, blocks, pool_of, simulate_all, trace_of
from experiments.page_tables import tables_of_page
from trimtab import InputError, RoutingTrace

STORED = Path(__file__).parents[2] / "docs" / "benchmarks" / "imbalance-workloads.json"
EXPERTS, TOP_K, RANKS = 32, 4, 8
SIZE = {"sources": 16, "mean_tokens": 256, "num_layers": 2, "num_steps": 9, "seed": 5}


def routing(workload: str, **more: int) -> RoutingTrace:
    return trace_of(workload, **{**SIZE, "num_experts": EXPERTS, "top_k": TOP_K, **more})


TRACES = {name: routing(name) for name in WORKLOADS}


def loads(workload: str, step: int | None = None, layer: int = 0) -> Any:
    """`[E]` rows of each expert over their mean, of one step or of all."""
    trace = TRACES[workload]
    part = trace if step is None else trace.select(np.flatnonzero(trace.steps == step))
    counts = np.bincount(part.expert_ids[:, layer].ravel(), minlength=EXPERTS)
    return counts / counts.mean()


def of_ranks(loads_E: Any) -> Any:
    """`[R]` load of each rank over the mean, with contiguous homes."""
    return loads_E.reshape(RANKS, -1).mean(axis=1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_token_has_distinct_experts(name: str) -> None:
    for top_k in (1, TOP_K):
        trace = TRACES[name] if top_k == TOP_K else routing(name, top_k=1)
        trace.check()
        ids = np.sort(trace.expert_ids, axis=2)
        assert ids.shape[1:] == (2, top_k)
        assert (np.diff(ids.astype(int), axis=2) > 0).all()
        assert trace.num_sequences == 16 * 9


@pytest.mark.parametrize("name", WORKLOADS)
def test_routing_depends_on_workload_seed_and_step_alone(name: str) -> None:
    trace, again, shorter = TRACES[name], routing(name), routing(name, num_steps=4)
    np.testing.assert_array_equal(trace.expert_ids, again.expert_ids)
    np.testing.assert_array_equal(trace.expert_ids[: shorter.num_tokens], shorter.expert_ids)
    if name != "W0_balanced":
        assert not np.array_equal(trace.expert_ids, routing(name, seed=6).expert_ids)
        first, second = (trace.select(np.flatnonzero(trace.steps == step)).expert_ids for step in (0, 1))
        assert not np.array_equal(first, second)
        assert not np.array_equal(trace.expert_ids[:, 0], trace.expert_ids[:, 1])


def test_w0_is_exactly_even() -> None:
    assert loads("W0_balanced").tolist() == [1.0] * EXPERTS


@pytest.mark.parametrize("name", ["W1_hot_expert_set", "W2_hot_rank"])
def test_w1_and_w2_have_hot_experts_on_the_first_ranks(name: str) -> None:
    for layer in range(2):
        loads_E = loads(name, layer=layer)
        # Three of four tokens draw from a quarter of the experts, the fourth from all.
        assert loads_E[:8] == pytest.approx([3.25] * 8, rel=0.05)
        assert loads_E[8:] == pytest.approx([0.25] * 24, rel=0.2)
        assert set(np.argsort(of_ranks(loads_E))[-2:]) == {0, 1}


def test_w3_has_hot_experts_but_no_hot_rank() -> None:
    loads_E = loads("W3_spread_hot_experts")
    assert loads_E[::2] == pytest.approx([1.75] * 16, rel=0.05)
    assert loads_E[1::2] == pytest.approx([0.25] * 16, rel=0.2)
    assert of_ranks(loads_E).max() < 1.03 < 3 < of_ranks(loads("W2_hot_rank")).max()


def test_w4_is_even_by_expert_and_ragged_by_source() -> None:
    assert loads("W4_source_ragged") == pytest.approx([1.0] * EXPERTS, rel=0.05)
    lengths = {name: trace.facts.lengths for name, trace in TRACES.items()}
    ragged = lengths.pop("W4_source_ragged")
    assert (ragged.min(), ragged.max()) == (64, 448)
    assert ragged.sum() == pytest.approx(16 * 9 * 256, rel=0.01)
    for other in lengths.values():
        assert set(other.tolist()) == {256}


def test_w5_has_experts_and_ranks_without_tokens() -> None:
    loads_E = loads("W5_zero_expert_rank")
    assert not loads_E[:16].any()
    assert loads_E[16:] == pytest.approx([2.0] * 16, rel=0.05)
    assert (of_ranks(loads_E) == 0).sum() == RANKS // 2


def test_w6_has_other_hot_experts_every_three_steps() -> None:
    hot = [frozenset(np.flatnonzero(loads("W6_rotating_hotspot", step) > 2).tolist()) for step in range(9)]
    assert hot == [frozenset(range(8 * (step // 3), 8 * (step // 3) + 8)) for step in range(9)]
    # After all experts, it begins again.
    np.testing.assert_array_equal(pool_of("W6_rotating_hotspot", 12, EXPERTS, TOP_K)[0], np.arange(8))


def test_w7_bursts_in_every_fourth_step() -> None:
    skew = [loads("W7_burst", step).max() for step in range(9)]
    # Half of the tokens draw from a quarter of the experts.
    assert [step for step in range(9) if skew[step] > 2] == [3, 7]
    assert skew[3] == pytest.approx(2.5, rel=0.1)
    assert max(skew[0], skew[4], skew[8]) < 1.2


def test_another_name_is_refused() -> None:
    with pytest.raises(InputError, match="W9: expected one of W0_balanced"):
        routing("W9")


def test_a_small_run_has_all_figures_of_the_table() -> None:
    size = {"sources": 16, "mean_tokens": 32, "num_layers": 1, "num_steps": 2, "seed": 0}
    step = imbalance_workloads.STEP | {"micro_steps": 1}
    names = ("W2_hot_rank", "W4_source_ragged")
    figures = simulate_all(names, size, step, ["static", "scheduled", "eplb", "trimtab"])
    figures = json.loads(json.dumps(figures))
    hot, ragged = (figures["workloads"][name] for name in names)
    assert hot["expert_max_over_mean"] > 3 > 1.5 > ragged["expert_max_over_mean"]
    for sent in ("tokens", "rows"):
        assert len(hot[sent]["trimtab"]["step_times_s"]) == 1
        # The hot experts are on 4 of 16 ranks.
        assert hot[sent]["static"]["max_over_mean"] > 3
    table = blocks(figures)["imbalance"].splitlines()
    assert len([line for line in table if line.startswith("| `W")]) == 4


def test_the_best_other_is_the_fastest_that_fits() -> None:
    def policy(seconds: float, slots: int, fits: bool = True) -> dict[str, Any]:
        return {"step_time_s": seconds, "slots_per_rank": slots, "fits": fits}

    policies = {
        "trimtab": policy(2.0, 5), "balanced": policy(1.0, 0), "laer": policy(1.0, 9, fits=False),
        "fastermoe": policy(1.6, 9), "eplb": policy(2.5, 5), "static": policy(4.0, 0),
    }  # fmt: skip
    assert imbalance_workloads.best_others(policies) == ("fastermoe", "eplb")
    assert imbalance_workloads.ratio(policies, "fastermoe") == pytest.approx(0.25)
    assert imbalance_workloads.ratio(policies, "eplb") == pytest.approx(-0.2)


def test_the_page_shows_the_stored_figures() -> None:
    figures = json.loads(STORED.read_text())
    assert tables_of_page(RESULTS.read_text(encoding="utf-8"))["imbalance"] == blocks(figures)["imbalance"]
    assert (figures["size"], figures["step"]) == (imbalance_workloads.SIZE, imbalance_workloads.STEP)
    assert tuple(figures["workloads"]) == WORKLOADS


def test_homes_follow_hot_experts_that_stay_for_some_steps() -> None:
    """Replicas even out the new hot experts, too, and take longer in each of three steps than one move of homes."""
    size = imbalance_workloads.SIZE | {"mean_tokens": 1024, "num_layers": 1}
    trace = trace_of("W6_rotating_hotspot", **size, num_experts=128, top_k=8)
    result = trimtab.simulate(
        trace,
        trimtab.Run(model="qwen3-30b-a3b", dispatcher="tokens", steps=8, **imbalance_workloads.STEP),
        policies="trimtab",
    )
    times = result.outcomes["trimtab"].step_times_s
    before, moving, after = times[3], times[5], times[6]
    assert moving > before > 1.05 * after
