"""`trimtab simulate`: its tables, its files and sweeps."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab import ClusterSpec, read_trace, write_trace
from trimtab.cluster.presets import read_preset
from trimtab.figures import plural
from trimtab.policies import POLICIES
from trimtab.report.number_text import bytes_text
from trimtab.report.sections import SHORT_PARTS
from trimtab.trace import synthesize

# These start commands, or import files in another process.
pytestmark = pytest.mark.slow

Places = dict[str, Path]
Printed = Callable[..., str]
CONFIG = {
    "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 128,
    "moe_intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 500,
}  # fmt: skip


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """A trace of two steps, its model and a cluster."""
    monkeypatch.setenv("COLUMNS", "400")
    trace = synthesize(num_sequences=24, sequence_length=32, num_layers=2, num_experts=16, top_k=4, zipf=0.9)
    trace = replace(trace, steps=np.repeat([0, 1], 12).astype(trace.steps.dtype))
    write_trace(trace, tmp_path / "trace.parquet")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    preset = read_preset("cluster", "h100x8")
    assert preset
    (tmp_path / "cluster.toml").write_text(preset)
    return {"folder": tmp_path} | {path.stem: path for path in tmp_path.iterdir()}


@pytest.fixture
def simulate(places: Places, printed: Printed) -> Printed:
    """Runs the command with the trace, taken as recorded, and its model, and returns what it prints."""

    def run(*arguments: str, policies: tuple[str, ...] = ("llep", "trimtab")) -> str:
        words = [
            "simulate",
            "{trace}",
            "--model",
            "{config}",
            "--ranks",
            "4",
            "--ranks-per-node",
            "2",
            "--sampled",
            "1",
        ]
        words.append("--policy")
        return printed(*(word.format(**places) for word in (*words, *policies, *arguments)))

    return run


def figures(places: Places, name: str = "s.json") -> Any:
    return json.loads((places["folder"] / name).read_text())


def test_simulate_prints_tables_and_writes_json_html_and_perfetto(simulate: Printed, places: Places) -> None:
    folder = places["folder"] / "out"
    files = ("--json", "{folder}/out/s.json", "--html", "{folder}/out/s.html", "--perfetto", "{folder}/out/s.json.gz")
    printed = simulate(*files)
    # The answer comes first.
    assert printed.startswith("Imbalance costs")
    titles = ("Recompute and update of one step, scaled from 2 to 4 MoE layers", "Where the milliseconds go")
    for text in (*titles, *SHORT_PARTS, "Gigabytes of the rank that needs most", "With expert ids permuted"):
        assert text in printed
    assert sorted(path.name for path in folder.iterdir()) == ["s.html", "s.json", "s.json.gz"]
    found = json.loads((folder / "s.json").read_text())
    assert found.keys() == {
        "schema", "trace_hash", "yardstick", "seed", "settings", "cluster", "model", "policies", "ids_permuted",
        "sensitivity",
    }  # fmt: skip
    assert found["sensitivity"] == []
    assert found["ids_permuted"]["step_time_s"].keys() == {"static", "trimtab", "balanced"}
    assert (found["schema"], found["settings"]["step"]) == ("trimtab-simulate-2", 1)
    assert list(found["policies"]) == ["static", "llep", "trimtab", "balanced"]
    assert ClusterSpec(**found["cluster"]).ranks_per_node == 2
    for name, row in found["policies"].items():
        shown = f"{row['speedup_vs_static']:.2f}x"
        assert any(name in line and shown in line for line in printed.splitlines())
    assert ">uses no routing; no replicas<" in (folder / "s.html").read_text(encoding="utf-8")
    written = gzip.decompress((folder / "s.json.gz").read_bytes())
    events = json.loads(written)["traceEvents"]
    assert {"experts", "dispatch", "attention"} <= {event["name"] for event in events}
    simulate("--json", "{folder}/out/again.json", "--perfetto", "{folder}/out/again.t.json")
    assert without_times(folder / "again.json") == without_times(folder / "s.json")
    assert (folder / "again.t.json").read_bytes() == written


def test_unknown_routes_are_reported(simulate: Printed, places: Places) -> None:
    trace = read_trace(places["trace"])
    trace.expert_ids[trace.sequence_starts[12] : trace.sequence_starts[15], 0] = trace.no_route
    for is_noted in (False, True):
        assert ("experts of 12.5% of rows are not recorded" in " ".join(simulate().split())) == is_noted
        write_trace(trace, places["trace"])


def test_names_of_balancers_are_not_cut_on_a_narrow_terminal(
    simulate: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert simulate(policies=("eplb", "eplb_oracle")).split().count("eplb_oracle") >= 2


def test_by_default_static_eplb_trimtab_and_even_routing_run(printed: Printed, places: Places) -> None:
    words = ["simulate", places["trace"], "--model", places["config"], "--ranks", "4", "--ranks-per-node", "2"]
    words += ["--micro-steps", "2", "--json", places["folder"] / "s.json"]
    printed(*words)
    assert list(figures(places)["policies"]) == ["static", "eplb", "trimtab", "balanced"]
    table = printed(*words, "--policy", "all").partition("Recompute and update of one step")[2].partition("Balance")[0]
    assert {*POLICIES} <= {row.split()[0] for row in table.splitlines() if row.strip()}
    assert list(figures(places)["policies"]) == list(POLICIES)


def test_a_trace_without_earlier_steps_says_that_eplb_has_no_history(simulate: Printed, places: Places) -> None:
    printed = simulate("--step", "0", policies=("eplb", "trimtab"))
    assert "eplb (no history)" in printed
    assert "times as fast as eplb" not in printed
    assert "static (eplb has no earlier step to plan from)" in printed
    printed = simulate("--step", "1", policies=("eplb", "trimtab"))
    assert "no history" not in printed
    assert "times as fast as eplb" in printed


def test_a_run_that_does_not_fit_says_so_first(simulate: Printed, places: Places) -> None:
    def limit_memory(size: float) -> None:
        lines = places["cluster"].read_text().splitlines()
        lines[lines.index("[device_bytes]") + 1] = f"value = {size}"
        (places["folder"] / "small.toml").write_text("\n".join(lines) + "\n")

    limit_memory(2e6)
    small = ("--cluster", "{folder}/small.toml", "--json", "{folder}/s.json", "--html", "{folder}/s.html",
             "--recompute-granularity", "none")  # fmt: skip
    printed = simulate(*small)
    found = figures(places)["policies"]
    assert not any(row["fits"] for row in found.values())
    needed = bytes_text(found["trimtab"]["peak_bytes_per_rank"])
    assert printed.startswith(f"Does not fit: EP 4 needs {needed} a rank; the device has 2.00 MB. It fits ")
    assert f"Does not fit: EP 4 needs {needed}" in (places["folder"] / "s.html").read_text(encoding="utf-8")
    # Enough for trimtab, not for the one that needs most.
    needs = {name: row["peak_bytes_per_rank"] for name, row in found.items() if name != "balanced"}
    most = max(needs, key=lambda name: needs[name])
    assert needs[most] > needs["trimtab"]
    limit_memory(needs[most] - 1)
    printed = simulate(*small)
    assert printed.startswith(f"Does not fit: {most}; {most} needs {bytes_text(needs[most])} a rank; ")
    row = next(line for line in printed.splitlines() if line.startswith(f"{most} "))
    assert " no " in row
    assert row.endswith(bytes_text(needs[most]))
    # Without trimtab: the fastest of those that fit.
    limit_memory(needs["trimtab"] - 1)
    printed = simulate(*small, policies=("static", "trimtab", "foremoe"))
    found = figures(places)["policies"]
    fitting = [name for name, row in found.items() if row["fits"] and name != "balanced"]
    assert fitting
    assert "trimtab" not in fitting
    fastest = min(fitting, key=lambda name: found[name]["step_time_s"])
    is_faster = found[fastest]["step_time_s"] < found["trimtab"]["step_time_s"]
    assert f"; {fastest} {'is faster' if is_faster else 'is the fastest that fits'}: " in printed


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        # 384 tokens on 4 ranks in 12 micro-steps would be 8 tokens.
        (("--micro-steps", "12"), "made 3: the longest sequence has 32 tokens, and 12 micro-steps would be 8 tokens"),
        (("--micro-steps", "3"), ""),
        # Places of 53 tokens hold one sequence.
        (("--micro-steps", "2"), "made 3: sequences of up to 32 tokens do not fill the budget of 53 tokens per rank"),
        (("--micro-steps", "1", "--mini-batches", "2"), "Asked for 1 micro-step, made 2: each of the 2 optimizer"),
        ((), ""),
        (("--token-budget", "64"), ""),
    ],
)
def test_micro_steps_that_cannot_be_met_are_explained(
    arguments: tuple[str, ...], note: str, simulate: Printed, places: Places
) -> None:
    printed = " ".join(simulate(*arguments, policies=("static",)).split())
    assert note in printed
    assert ("Asked for" in printed) == bool(note)


def test_a_sweep_explains_micro_steps_case_by_case(simulate: Printed, places: Places) -> None:
    printed = " ".join(simulate("--micro-steps", "3", "12", policies=("static",)).split())
    assert "4 ranks, auto slots, 12 micro-steps: Asked for 12 micro-steps, made 3" in printed
    assert printed.count("Asked for") == 1


@pytest.mark.parametrize("words", ["--policy llep,eplb {trace}", "--policy llep eplb {trace}", "--policy=llep {trace}"])
def test_a_trace_may_follow_the_names_of_balancers(words: str, printed: Printed, places: Places) -> None:
    more = " --model {config} --ranks 4 --ranks-per-node 2 --micro-steps 2 --json {folder}/s.json"
    printed("simulate", *(words + more).format(**places).split())
    found = figures(places)["policies"]
    assert list(found) == ["static", *(["eplb"] if "eplb" in words else []), "llep", "balanced"]


def without_times(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    for part in (found, *found.get("sweep", [])):
        for row in part["policies"].values():
            assert row.pop("plan_us_per_instance") > 0
    return found


def test_the_first_case_that_fits_is_the_answer(simulate: Printed, places: Places) -> None:
    """One micro-step needs more memory than three."""
    sweep = ("--micro-steps", "1", "3", "--json", "{folder}/s.json", "--cluster", "{cluster}",
             "--recompute-granularity", "none")  # fmt: skip
    assert "4 ranks, auto slots, 1 micro-step: Imbalance costs" in simulate(*sweep)
    peaks = [
        [sum(each["memory_bytes"].values()) for each in case["policies"].values()] for case in figures(places)["sweep"]
    ]
    assert max(peaks[1]) < min(peaks[0])
    text = places["cluster"].read_text()
    assert "[device_bytes]\nvalue = 80e9\n" in text
    between = (max(peaks[1]) + min(peaks[0])) // 2
    places["cluster"].write_text(text.replace("[device_bytes]\nvalue = 80e9\n", f"[device_bytes]\nvalue = {between}\n"))
    assert "4 ranks, auto slots, 3 micro-steps: Imbalance costs" in simulate(*sweep)


def test_sweep_runs_every_combination(simulate: Printed, places: Places) -> None:
    sweep = ("--slots", "0", "2", "--micro-steps", "1", "3", "--json", "{folder}/s.json")
    printed = simulate(*sweep, policies=("foremoe",))
    assert "Milliseconds of a step in every case" in printed
    found = without_times(places["folder"] / "s.json")
    cases = [(case["ranks"], case["slots"], case["micro_steps"]) for case in found["sweep"]]
    assert cases == [(4, 0, 1), (4, 0, 3), (4, 2, 1), (4, 2, 3)]
    assert found["policies"] == found["sweep"][0]["policies"]
    assert all(case["policies"]["foremoe"]["replicas_per_instance"] == 0 for case in found["sweep"][:2])
    for ranks, slots, size in cases:
        assert f"{ranks} ranks, {slots} slots, {plural(size, 'micro-step')}: Recompute and update" in printed
    assert found["sweep"][0]["policies"]["static"]["micro_steps"] == 1
    assert found["settings"]["micro_steps"] == 1
    page = ("--slots", "0", "1", "2", "--micro-steps", "1", "2", "--html", "{folder}/page.html")
    # With six cases only the table of all is printed.
    assert "Recompute and update" not in simulate(*page, policies=("foremoe",))
    text = (places["folder"] / "page.html").read_text(encoding="utf-8")
    main_table = text[text.index('id="cases"') : text.index('id="policies"')]
    assert main_table.count("<tr") == 1 + 6
    alone = ("--slots", "2", "--micro-steps", "3", "--json", "{folder}/alone.json")
    simulate(*alone, policies=("foremoe",))
    assert without_times(places["folder"] / "alone.json")["policies"] == found["sweep"][3]["policies"]


def test_dispatchers_are_cases_of_a_sweep(simulate: Printed, places: Places) -> None:
    printed = " ".join(simulate("--dispatcher", "rows", "tokens", "--json", "{folder}/s.json").split())
    first, second = figures(places)["sweep"]
    assert (first["dispatch_forwards"], second["dispatch_forwards"]) == (False, True)
    # The first line answers for both.
    assert printed.startswith("Rows sent: Imbalance costs")
    assert "Tokens sent: Imbalance costs" in printed
    for name in ("static", "trimtab"):
        rows, tokens = (case["policies"][name]["parts_s"]["dispatch"] for case in (first, second))
        assert rows > tokens
    simulate("--dispatcher", "tokens", "--json", "{folder}/t.json")
    assert figures(places, "t.json")["cluster"]["dispatch_forwards"]


def test_steps_end_with_the_one_that_was_asked_for(simulate: Printed, places: Places, error_of: Printed) -> None:
    assert "mean of" not in simulate("--json", "{folder}/s.json")
    assert figures(places)["settings"]["steps"] == 1
    # The trace has two steps; the first is left out unless it is asked for.
    assert "Recompute and update of a step, mean of 2" in simulate("--steps", "2", "--json", "{folder}/b.json")
    both, last = (figures(places, name)["policies"]["static"] for name in ("b.json", "s.json"))
    assert both["step_times_s"][1:] == [last["step_time_s"]]
    assert both["step_time_s"] == pytest.approx(sum(both["step_times_s"]) / 2)
    words = ["simulate", places["trace"], "--model", places["config"], "--ranks", "4"]
    assert "trace.parquet has 1 step up to step 0" in error_of(*words, "--step", "0", "--steps", "2")


def test_options_reach_the_simulation(simulate: Printed, places: Places) -> None:
    settings = ("--groups", "2", "--groups-meet", "layer", "--mini-batches", "2", "--equal-terms", "--step", "0",
                "--sharding", "fsdp", "--recompute-granularity", "full", "--tp", "2")  # fmt: skip
    size = ("--token-budget", "64", "--cluster", "{cluster}")
    simulate(*settings, *size, "--json", "{folder}/s.json", policies=("trimtab",))
    found = figures(places)
    assert found["settings"] == {
        "trace": str(places["trace"]), "step": 0, "steps": 1,
        "token_budget": 64, "mini_batches": 2, "equal_terms": True,
        "groups": 2, "meet": "layer", "ring_layers": 3, "recompute": True, "sharding": "fsdp", "checkpointing": True,
        "earlier_steps": 0, "layers_traced": 2, "layers_of_model": 4, "micro_steps": None, "recorded_sequences": None,
        "assumed": [], "counted_rows": 1 << 24, "layout": {"tp": 2, "pp": 1, "cp": 1},
    }  # fmt: skip
    # 12 sequences of 32 tokens, two in each of 4 places, in two mini-batches.
    assert {row["micro_steps"] for row in found["policies"].values()} == {2}
    assert found["cluster"]["name"] == "h100x8"
    size = ("--micro-steps", "2", "--json", "{folder}/g.json")
    budgets = []
    for groups in ("1", "2"):
        simulate(*size, "--groups", groups, policies=("static",))
        budgets.append(figures(places, "g.json")["settings"]["token_budget"])
    # 384 tokens and a tenth, in 2 micro-steps on 4 ranks; on 8 ranks a sequence of 32 still has to fit.
    assert budgets == [53, 32]
