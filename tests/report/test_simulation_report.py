"""Every figure of a simulated step is the one that its name says: steps of known length and loads counted plainly."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from trimtab import ClusterSpec, RoutingTrace
from trimtab.cluster import ModelSpec
from trimtab.planner import SequenceCounts
from trimtab.report.model import PolicyResult, Report
from trimtab.report.policies_table import balance_and_replicas, policies_table, sweep_table
from trimtab.report.sections import _memory_table, _parts_table
from trimtab.report.simulation import answer, notes, policy_results, setting_facts, simulation_report, table_title
from trimtab.report.tables import TableData, balance_tables, plan_balance_table, trace_facts
from trimtab.simulator.comparison import simulate_policy
from trimtab.simulator.comparison_case import ComparisonCase, step_of
from trimtab.simulator.expert_time import Balance
from trimtab.simulator.simulated_case import SimulatedCase
from trimtab.trace.store import open_trace

MODEL = ModelSpec("small", num_experts=8, top_k=2, hidden_size=64, expert_width=32, moe_layers=6, vocab_size=100)
STEP_S = {"static": 4.0, "eplb": 2.5, "trimtab": 2.0, "balanced": 1.6}
PERMUTED_S = {"static": 3.0, "eplb": 2.4, "trimtab": 2.0, "balanced": 1.5}


def some_trace() -> RoutingTrace:
    """Two steps of 12 sequences in 2 of 6 layers."""
    rng = np.random.default_rng(0)
    skew_LE = 2 * rng.gumbel(size=(2, 8))
    ids = [np.argsort(-rng.gumbel(size=(40, 2, 8)) - skew_LE, axis=-1)[:, :, :2] for _ in range(24)]
    return RoutingTrace.from_sequences(ids, num_experts=8, steps=np.repeat([0, 1], 12), layer_indices=[3, 5])


@pytest.fixture(scope="module")
def simulated() -> SimulatedCase:
    """Plans as they are, with the step times above and balances that differ in every figure."""
    step, earlier = step_of(some_trace(), None)
    case = ComparisonCase(
        ClusterSpec(4, 2, 1), MODEL, SequenceCounts.from_trace(step), tuple(map(SequenceCounts.from_trace, earlier)), 40
    )
    # EPLB's plan in place of Trimtab's, which takes long to make without compiled kernels.
    made_by = {name: name for name in STEP_S} | {"trimtab": "eplb_oracle"}
    outcomes = {name: replace(simulate_policy(case, maker), name=name) for name, maker in made_by.items()}
    for name, seconds in STEP_S.items():
        outcome = outcomes[name]
        outcomes[name] = replace(
            outcome,
            simulated=replace(
                outcome.simulated,
                step_time_s=seconds,
                causes_s=outcome.simulated.causes_s | {"waiting": 0.25 * seconds},
            ),
            balance=Balance(mean=1 + seconds / 10, p50=1 + seconds / 20, p99=1 + seconds / 2, max=1 + seconds),
            cross_node_fraction=seconds / 8,
        )
    return SimulatedCase(4, 1, 3, case, outcomes, PERMUTED_S, 0.5 * PERMUTED_S["static"])


@pytest.fixture(scope="module")
def results(simulated: SimulatedCase) -> dict[str, PolicyResult]:
    return {result.name: result for result in policy_results(simulated)}


@pytest.fixture(scope="module")
def report(simulated: SimulatedCase) -> Report:
    return simulation_report("t.parquet", step_of(some_trace(), None)[0], [simulated])


def column(table: TableData, header: str) -> list[str]:
    return [row.cells[table.columns.index(header) - 1] for row in table.rows]


def test_replicas_are_per_layer_and_micro_step(simulated: SimulatedCase, results: dict[str, PolicyResult]) -> None:
    plan = simulated.outcomes["trimtab"].plan
    numbers = [len(plan.replicas_of(m, layer)) for m in range(plan.num_micro_steps) for layer in range(2)]
    assert plan.num_micro_steps > 1
    assert results["trimtab"].replicas_per_instance == np.mean(numbers) > 0
    assert results["static"].replicas_per_instance == 0


def test_tables_show_each_figure_in_its_column(results: dict[str, PolicyResult]) -> None:
    """From the fastest to the slowest, the ideal run last."""
    times, balance = policies_table(list(results.values())), balance_and_replicas(list(results.values()))
    assert column(times, "step time") == ["2.000 s", "2.500 s", "4.000 s", "1.600 s"]
    assert column(times, "speed-up") == ["2.00x", "1.60x", "1.00x", "2.50x"]
    assert column(times, "over eplb") == ["1.25x", "1.00x", "0.62x", "1.56x"]
    assert column(times, "of ideal") == ["80.0%", "64.0%", "40.0%", "100.0%"]
    assert [row.bar for row in times.rows] == [0.5, 0.625, 1.0, 0.4]
    assert column(balance, "max/mean") == ["1.200", "1.250", "1.400", "1.160"]
    assert column(balance, "p99") == ["2.000", "2.250", "3.000", "1.800"]
    assert column(balance, "far rows") == ["25.0%", "31.2%", "50.0%", "20.0%"]
    assert column(balance, "replicas")[0] == f"{results['trimtab'].replicas_per_instance:.1f}"


def test_parts_and_memory_in_tables(results: dict[str, PolicyResult]) -> None:
    parts = {"attention": 0.5, "dispatch": 0.25, "experts": 1.0, "imbalance": 0.125, "transfers": 0.0625}
    parts |= {"planning": 0.03, "migration": 0.02, "optimizer": 0.01}
    memory = {"parameters": 3e9, "replica pool": 4.5e8}
    one = replace(results["trimtab"], parts_s=parts, memory_bytes=memory)
    # Milliseconds and gigabytes.
    assert _parts_table([one]).rows[0].cells == ("500", "250", "1,000", "125", "62", "30", "20", "10")
    table = _memory_table([one])
    assert (table.columns, table.rows[0].cells) == (("policy", "params", "copies"), ("3.0", "0.5"))


def test_the_answer_has_the_cost_of_imbalance_and_speed_ups(simulated: SimulatedCase) -> None:
    text = answer(simulated)
    # 1 / 2.5 and 1 / 2 of the step are left with even routing.
    assert text.startswith("Imbalance costs 60% of each step on 4 ")
    assert " (of it, waiting 25%); trimtab " in text
    assert "; trimtab makes the step 2.00 times as fast as static and 1.25 times as fast as eplb. " in text
    assert "Perfectly even routing would make it 2.50 times as fast. " in text
    assert "With expert ids permuted, imbalance costs 50%, and trimtab is 1.50 times as fast as static" in text
    assert text.endswith(" and 1.20 times as fast as eplb.")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"The trace has 2 of the model's 6 MoE layers"}),
        ({"model": replace(MODEL, moe_layers=2)}, set()),
        ({"model": replace(MODEL, moe_layers=2), "measured": 2}, {"Seconds are the mean of 2 steps"}),
        ({"model": replace(MODEL, moe_layers=2), "earlier": ()}, {"The trace has no earlier step"}),
    ],
)
def test_notes_are_those_of_the_case(changes: dict[str, Any], expected: set[str], simulated: SimulatedCase) -> None:
    case = replace(simulated.case, **changes)
    text = " ".join(notes(step_of(some_trace(), None)[0], [replace(simulated, case=case)]))
    assert set(re.findall(r"The trace has [^;:]*|Seconds are the mean of \d steps", text)) == expected


def test_maps_show_loads_of_homes_before_and_those_of_the_plan_after(simulated: SimulatedCase, report: Report) -> None:
    static, planned = simulated.outcomes["static"], simulated.outcomes["trimtab"]
    counts_MLE = static.workload.token_counts_MLRE.sum(axis=2, dtype=np.int64)
    by_home = counts_MLE.reshape(*counts_MLE.shape[:2], 4, 2).sum(axis=-1)
    assert (report.before.title, report.after.title) == ("static", "trimtab")
    assert np.array_equal(report.before.loads_MLR, by_home)
    assert np.array_equal(report.after.loads_MLR, planned.plan.rank_loads(planned.workload))
    assert not np.array_equal(report.before.loads_MLR, report.after.loads_MLR)


def test_names_layers_and_settings_are_those_of_the_trace(simulated: SimulatedCase, report: Report) -> None:
    assert report.layer_names == ("3", "5")
    assert table_title(simulated).endswith(", scaled from 2 to 6 MoE layers")
    facts = dict(setting_facts("t.parquet", step_of(some_trace(), None)[0], simulated))
    assert facts["trace"] == "t.parquet, step 1: 480 tokens, 12 sequences"
    assert facts["cluster"].startswith("4 ranks, 2 per node")
    micro_steps = simulated.outcomes["static"].plan.num_micro_steps
    assert facts["micro-steps"] == f"{micro_steps}, each of up to 40 tokens per rank"


def test_timelines_are_of_the_middle_micro_step(simulated: SimulatedCase, report: Report) -> None:
    titles = [timeline.title for timeline in report.timelines]
    middle = {name: simulated.outcomes[name].plan.num_micro_steps // 2 for name in ("trimtab", "static")}
    assert titles == [f"{name}, update of micro-step {number}, 2 of 6 MoE layers" for name, number in middle.items()]
    for timeline in report.timelines:
        assert (timeline.end_N >= timeline.start_N).all()
        assert (timeline.end_N > timeline.start_N).any()


def test_a_sweep_has_the_times_of_each_balancer(simulated: SimulatedCase) -> None:
    table = sweep_table([simulated])
    assert table.title == "Seconds of a step in every case"
    assert (table.rows[0].name, *table.rows[0].cells) == (
        "4", "1", "3", "trimtab 2.00", "yes", "2.00", "2.50", "4.00", "1.60",
    )  # fmt: skip
    quick = {name: replace(each, simulated=replace(each.simulated, step_time_s=each.simulated.step_time_s / 10))
             for name, each in simulated.outcomes.items()}  # fmt: skip
    table = sweep_table([replace(simulated, outcomes=quick)])
    assert table.title == "Milliseconds of a step in every case"
    assert table.rows[0].cells[2:] == ("trimtab 200", "yes", "200", "250", "400", "160")
    # Neither trimtab nor eplb ran: they have no columns.
    few = {name: quick[name] for name in ("static", "balanced")}
    table = sweep_table([replace(simulated, outcomes=few)])
    assert table.columns[-3:] == ("fits", "static", "ideal")
    assert table.rows[0].cells[2:] == ("static 400", "yes", "400", "160")
    # Enough memory for all but one of the three balancers; the ideal run is none.
    most = max(outcome.peak_bytes for outcome in simulated.outcomes.values())
    greedy = replace(simulated.outcomes["eplb"], memory={"parameters": most + 2})
    cramped = replace(simulated.case, cluster=replace(simulated.case.cluster, device_bytes=most + 1))
    table = sweep_table([replace(simulated, case=cramped, outcomes=simulated.outcomes | {"eplb": greedy})])
    assert table.rows[0].cells[3] == "2 of 3"


def test_balance_before_and_after_a_plan() -> None:
    before, after = Balance(mean=1.5, p50=1.4, p99=2.0, max=2.5), Balance(mean=1.05, p50=1.04, p99=1.2, max=1.3)
    table = plan_balance_table(before, after)
    assert table.columns == ("homes", "mean", "p50", "p99", "max")
    found: dict[str, Any] = {row.name: row.cells for row in table.rows}
    assert found["static"] == ("1.500", "1.400", "2.000", "2.500")
    assert found["planned"] == ("1.050", "1.040", "1.200", "1.300")


def test_layers_that_gain_most_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    trace = RoutingTrace.from_sequences([np.zeros((1, 3, 1), int)], num_experts=2, layer_indices=[4, 6, 9])
    before = np.array([[[30, 10], [20, 20], [36, 4]]])
    Console(width=120).print(balance_tables(trace, before, np.full((1, 3, 2), 20)))
    rows = capsys.readouterr().out.partition("Layers that gain most")[2].splitlines()[2:5]
    assert [row.split() for row in rows] == [["9", "1.800", "1.000"], ["4", "1.500", "1.000"], ["6", "1.000", "1.000"]]


def test_facts_of_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """960 tokens of 2 layers; a byte for each of 2 ids."""
    Console(width=120).print(trace_facts(open_trace(some_trace()), 12))
    text = " ".join(capsys.readouterr().out.split())
    assert "sequences 24 of 40 to 40 tokens, 960 tokens in all" in text
    assert "unknown routes 12 of 1,920 (token, layer) pairs" in text
    assert "3.84 kB of expert ids" in text
    assert "RL steps 0, 1" in text


def test_parts_add_up_to_the_step(simulated: SimulatedCase) -> None:
    """The last rank had less compute than the mean: there was no waiting for it."""
    outcome = simulated.outcomes["static"]
    parts = dict.fromkeys(outcome.simulated.parts_s, 0.0) | {"experts": 1.0, "attention": 3.25, "imbalance": -0.25}
    changed = replace(outcome, simulated=replace(outcome.simulated, parts_s=parts))
    memory = {"expert parameters": 3 * 10**9, "dense parameters": 10**9, "activations": 2 * 10**8}
    changed = replace(changed, memory=memory)
    result = policy_results(replace(simulated, outcomes=simulated.outcomes | {"static": changed}))[0]
    assert (result.parts_s["experts"], result.parts_s["imbalance"]) == (0.75, 0.0)
    assert sum(result.parts_s.values()) == result.step_time_s == 4.0
    # Memory of experts and dense parts is added.
    assert result.memory_bytes == {"parameters": 4e9, "activations": 2e8}
