"""`trimtab.plan`, `simulate` and `analyze`: the commands' figures, short texts, escaped HTML, one line for mistakes."""

from __future__ import annotations

import json
import pydoc
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot

import trimtab
from helpers.calls import called
from helpers.trace_arrays import write_npz
from trimtab import InputError, ModelSpec, RoutingTrace, read_trace, write_trace
from trimtab.cli.main import main
from trimtab.trace import synthesize

CONFIG = {
    "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 128,
    "moe_intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 500,
}  # fmt: skip
PLAN: dict[str, Any] = {"ranks": 4, "ranks_per_node": 2, "token_budget": 64}
SIMULATE: dict[str, Any] = {"ranks": 4, "ranks_per_node": 2, "policies": ["llep", "trimtab"], "micro_steps": 2}
ANALYZE: dict[str, Any] = {"ranks": 4, "ranks_per_node": 2, "micro_steps": 2}
FUNCTIONS = {"plan": PLAN, "simulate": SIMULATE, "analyze": ANALYZE}
# Measured while planning; every other figure is the same in every run.
TIMES = ("planning_s", "us_per_instance", "plan_us_per_instance")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two steps, in one file and in two, its model, an empty trace, and a cluster without links."""
    trace, path = made(), tmp_path_factory.mktemp("traces")
    write_trace(trace, path / "trace.parquet")
    write_trace(trace, path / "<b onclick=x>&.parquet")
    write_trace(trace.part(0, 10), path / "run" / "0.parquet")
    write_trace(trace.part(10, 24), path / "run" / "1.parquet")
    write_trace(trace.part(0, 0), path / "empty.parquet")
    write_trace(RoutingTrace.from_sequences([[[[0]]]], num_experts=1), path / "one.parquet")
    (path / "config.json").write_text(json.dumps(CONFIG))
    links = ("node_bytes_per_s", "network_bytes_per_s", "host_bytes_per_s")
    without = "".join(f'[{link}]\nvalue = 0\nsource = "none"\n' for link in links)
    (path / "no-links.toml").write_text(f'format = "trimtab-cluster-1"\nname = "ours"\nbase = "h100x8"\n{without}')
    return path


def made() -> RoutingTrace:
    trace = synthesize(num_sequences=24, sequence_length=32, num_layers=2, num_experts=16, top_k=4, zipf=0.9)
    trace.expert_ids[trace.sequence_starts[12] : trace.sequence_starts[13], 0] = trace.no_route
    return replace(trace, steps=np.repeat([0, 1], 12).astype(np.int32), model="<i>made</i>")


def call(name: str, trace: Any, folder: Path, **changed: Any) -> Any:
    arguments = {"model": str(folder / "config.json")} | FUNCTIONS[name] | changed
    return called(getattr(trimtab, name), trace, **arguments)


def words(arguments: dict[str, Any]) -> list[str]:
    """Arguments of a function as options of its command."""
    found = []
    for name, value in arguments.items():
        found += ["--" + name.replace("_", "-"), *map(str, value if isinstance(value, list) else [value])]
    return found


def without(found: Any, *names: str) -> Any:
    """JSON as it is read back, without the named keys at any depth."""
    if isinstance(found, dict):
        return {key: without(value, *names) for key, value in found.items() if key not in names}
    return [without(each, *names) for each in found] if isinstance(found, list | tuple) else found


def json_of(name: str, folder: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """The command's JSON, without times."""
    written = folder / "out.json"
    assert main([name, str(folder / "trace.parquet"), *words(arguments), "--json", str(written)]) == 0
    return dict(without(json.loads(written.read_text()), *TIMES))


# Defaults, and other settings.
@pytest.mark.parametrize(
    ("name", "arguments"), [("plan", {"ranks": 4}), ("simulate", {}), ("analyze", {}), *FUNCTIONS.items()]
)
def test_figures_equal_the_commands_json(name: str, arguments: dict[str, Any], folder: Path) -> None:
    if arguments is FUNCTIONS[name] or name == "simulate":
        arguments = arguments | {"model": str(folder / "config.json"), "step": 1}
    found = without(called(getattr(trimtab, name), folder / "trace.parquet", **arguments).figures(), *TIMES)
    expected = json_of(name, folder, arguments)
    assert list(found) == list(expected)
    assert found == expected


def test_a_sweep_has_a_case_for_every_combination(folder: Path) -> None:
    config = folder / "config.json"
    arguments = {"ranks": [2, 4], "slots": [0, 2], "policies": ["static"], "model": str(config)}
    calls = []
    found = trimtab.simulate(
        str(folder / "trace.parquet"),
        trimtab.Run(model=ModelSpec.from_config(config)).sweep(ranks=(2, 4), slots=(0, 2)),
        policies="static",
        progress=lambda *each: calls.append(each),
    )
    assert without(found.figures(), *TIMES) == json_of("simulate", folder, arguments)
    assert [(case.ranks, case.slots, case.micro_steps) for case in found.cases] == [
        (2, 0, None), (2, 2, None), (4, 0, None), (4, 2, None),
    ]  # fmt: skip
    assert found.outcomes is found.cases[0].outcomes
    # Two balancers and permuted ids in each of four cases.
    assert [(done, total) for _, done, total in calls] == [(done, 12) for done in range(13)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_trace_may_be_a_file_files_or_in_memory(name: str, folder: Path) -> None:
    run = folder / "run"
    sources = [
        folder / "trace.parquet",
        str(folder / "trace.parquet"),
        run,
        f"{run}/*.parquet",
        [run / "0.parquet", str(run / "1.parquet")],
        read_trace(folder / "trace.parquet"),
        # Ids within top_k in any order.
        made(),
    ]
    found = [without(call(name, each, folder).figures(), "trace", *TIMES) for each in sources]
    assert all(each == found[0] for each in found[1:])
    assert "trace in memory" in repr(call(name, made(), folder))


def test_an_estimate_has_the_nodes_of_the_analysis(folder: Path) -> None:
    """Rows between nodes take longer than those inside."""
    trace = read_trace(folder / "trace.parquet")
    inside, between = (call("analyze", trace, folder, ranks_per_node=per_node) for per_node in (4, 1))
    assert inside.analysis.estimate.step_s < between.analysis.estimate.step_s


@pytest.mark.parametrize("name", FUNCTIONS)
def test_repr_is_short(name: str, folder: Path) -> None:
    odd = folder / "<b onclick=x>&.parquet"
    result = call(name, odd, folder)
    text = repr(result)
    assert str(odd) in text.splitlines()[0]
    assert 1 <= len(text.splitlines()) <= 5


def test_repr_of_a_sweep(folder: Path) -> None:
    result = call("simulate", folder / "run", folder, ranks=[2, 4], policies=())
    assert len(repr(result).splitlines()) <= 5
    assert "1 more in cases" in repr(result)
    assert repr(result.cases[1]) == "SimulatedCase: 4 ranks, auto slots, 2 micro-steps; static, balanced"


def test_dir_and_help_list_the_functions() -> None:
    assert dir(trimtab) == sorted(["__version__", *trimtab.__all__])
    text = pydoc.plain(pydoc.render_doc(trimtab))
    assert all(f"    {name}(trace" in text for name in FUNCTIONS)
    assert all(isinstance(getattr(trimtab, name), ModuleType) for name in ("analysis", "planner", "simulator"))


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("plan", {"ranks": 0}, "ranks: 0 should be a whole number of at least 1"),
        ("plan", {"ranks": "4"}, "ranks: '4' should be a whole number of at least 1"),
        ("plan", {"slots": -1}, "slots: -1 should be a whole number of at least 0"),
        ("plan", {"token_budget": 2**31}, "token_budget: 2147483648 is too large; it should be at most 2147483647"),
        ("plan", {"ranks": 3, "ranks_per_node": 3}, "--ranks 3 doesn't divide the 16 experts of "),
        ("plan", {"ranks_per_node": 3}, "don't make whole nodes; ranks per node should divide the ranks"),
        ("plan", {"token_budget": 64, "micro_steps": 2}, "micro_steps: not allowed with argument token_budget"),
        ("plan", {"token_budget": 8}, "a sequence of 32 tokens doesn't fit"),
        ("plan", {"step": 9}, "no step 9; it has steps 0 to 1"),
        ("plan", {"policy": "magic"}, "unknown policy magic; use one of static, "),
        ("plan", {"model": "absent"}, "absent: neither a model that comes with Trimtab"),
        ("simulate", {"policies": "magic"}, "unknown policies magic; use one of static, "),
        ("simulate", {"groups_meet": "never"}, "unknown groups_meet never; use one of layer, step"),
        ("simulate", {"token_budget": 64}, "micro_steps: not allowed with argument token_budget"),
        ("simulate", {"micro_steps": None, "token_budget": 0}, "token_budget: 0 should be a whole number"),
        ("simulate", {"ranks": [4, 32]}, "--ranks 32 doesn't divide the 16 experts"),
        ("simulate", {"ranks": []}, "expected at least one"),
        ("simulate", {"slots": 0.5}, "slots: 0.5 should be a whole number of at least 0"),
        ("simulate", {"mini_batches": 0}, "mini_batches: 0 should be a whole number of at least 1"),
        ("simulate", {"model": None}, "no model that comes with Trimtab has 16 experts, top-4"),
        ("simulate", {"model": "qwen3-30b-a3b"}, "is not of model qwen3-30b-a3b"),
        ("simulate", {"step": 2}, "there is no step 2; the trace has steps 0 to 1"),
        ("simulate", {"cluster": "absent"}, "absent"),
        ("simulate", {"cluster": "no-links.toml"}, "some replicas have no path"),
        ("simulate", {"ranks_per_node": 3}, "don't make whole nodes"),
        ("simulate", {"micro_steps": None, "token_budget": 31}, "a sequence of 32 tokens doesn't fit"),
        ("simulate", {"micro_steps": 13}, "has 12 sequences; every micro-step needs one"),
        ("analyze", {"ranks": 3}, "--ranks 3 doesn't divide the 16 experts of"),
        ("analyze", {"token_budget": 64}, "micro_steps: not allowed with argument token_budget"),
        ("analyze", {"step": 9}, "no step 9; it has steps 0 to 1"),
        ("analyze", {"model": "qwen3-30b-a3b"}, "is not of model qwen3-30b-a3b"),
        ("analyze", {"ranks_per_node": 3}, "4 ranks with 3 a node"),
        ("analyze", {"micro_steps": None, "token_budget": 8}, "a sequence of 32 tokens doesn't fit"),
        ("analyze", {"cluster": "absent"}, "absent"),
    ],
)
def test_wrong_arguments_give_one_line(
    name: str, changed: dict[str, Any], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for trace in (folder / "trace.parquet", made()):
        assert message in refusal(name, trace, folder, **changed)


def refusal(name: str, trace: Any, folder: Path, **changed: Any) -> str:
    with pytest.raises(InputError) as error:
        call(name, trace, folder, **changed)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_traces_give_one_line(name: str, folder: Path) -> None:
    twice = made()
    twice.expert_ids[5, 1] = 3
    wrong: list[tuple[Any, str]] = [
        (folder / "absent.parquet", "absent.parquet: no such file"),
        (folder / "config.json", "not a Parquet file; what a framework recorded is converted by: trimtab trace import"),
        (folder / "empty.parquet", "empty.parquet: the trace is empty"),
        (made().part(0, 0), "trace in memory: the trace is empty"),
        ([folder / "trace.parquet", folder / "one.parquet"], "traces of different models"),
        (twice, "token 5 in MoE layer 1 has expert ids [3, 3, 3, 3]"),
        ([], "trace is a list; it should be a RoutingTrace, a path or a list of paths"),
        ([made()], "trace is a list; it should be"),
        (3, "trace is a int; it should be"),
    ]
    for source, message in wrong:
        assert message in refusal(name, source, folder)


def test_plots_and_tables_of_results(folder: Path) -> None:
    trace = folder / "trace.parquet"
    analysis, plan, simulation = (call(name, trace, folder) for name in ("analyze", "plan", "simulate"))
    for result in (analysis, plan, simulation):
        for kind in ("layers", "heatmap", "cdf"):
            ax = result.plot(kind)
            assert result.plot(kind, ax) is ax
            pyplot.close(ax.figure)
    table = analysis.to_pandas()
    assert len(table) == np.prod(analysis.analysis.max_over_mean_ML.shape)
    assert table["max_over_mean"].mean() - 1 == pytest.approx(analysis.figures()["max_vio"]["mean"])
    assert table.groupby("step")["micro_step"].nunique().tolist() == [3, 3]
    means = plan.to_pandas().groupby("plan")["max_over_mean"].mean()
    assert means.to_dict() == pytest.approx({"static": plan.balance_before.mean, "trimtab": plan.balance_after.mean})
    assert next(iter(simulation.imbalance.loads)) == "static"


def test_a_table_of_a_sweep_has_every_balancer_of_every_case(folder: Path) -> None:
    result = call(
        "simulate",
        folder / "trace.parquet",
        folder,
        ranks=[2, 4],
        policies="llep,trimtab",
        dispatcher=["tokens", "rows"],
    )
    table = result.to_pandas()
    assert len(table) == 2 * 2 * 4
    row = table[(table["ranks"] == 4) & (table["dispatcher"] == "rows") & (table["balancer"] == "llep")].iloc[0]
    (case,) = (case for case in result.figures()["sweep"] if case["ranks"] == 4 and not case["dispatch_forwards"])
    figures = case["policies"]["llep"]
    assert row["step_time_s"] == figures["step_time_s"]
    assert row["parts_s.experts"] == figures["parts_s"]["experts"]
    assert row["state_bytes.dense parts.optimizer state"] == figures["state_bytes"]["dense parts"]["optimizer state"]
    assert "step_times_s" not in table


def test_names_in_one_text_are_those_of_a_list(folder: Path) -> None:
    results = [call("simulate", made(), folder, policies=names) for names in ("llep,trimtab", ["llep", "trimtab"])]
    assert [list(result.outcomes) for result in results] == [["static", "llep", "trimtab", "balanced"]] * 2
    with pytest.raises(InputError, match="unknown policies magic"):
        call("simulate", made(), folder, policies="llep,magic")


def test_reprs_are_one_line(folder: Path) -> None:
    result = call("plan", made(), folder)
    trace = made()
    assert repr(trace) == (
        "RoutingTrace(24 sequences, 768 tokens, 2 MoE layers, 16 experts, top-4, steps 0 to 1, <i>made</i>)"
    )
    assert repr(trace.part(0, 0)).endswith(
        "0 sequences, 0 tokens, 2 MoE layers, 16 experts, top-4, steps none, <i>made</i>)"
    )
    size = f"{result.num_micro_steps} micro-steps of 2 layers on 4 ranks"
    assert repr(result.plan) == f"StepPlan({size}, 12 sequences, {result.num_replicas:,} replicas)"
    analysis = call("analyze", made(), folder).analysis
    assert re.fullmatch(
        r"Analysis\(6 micro-steps of 2 layers on 4 ranks, max/mean [\d.]+, \d+% of .* lost\)", repr(analysis)
    )


def test_a_dump_is_imported_as_by_the_command(folder: Path, tmp_path: Path) -> None:
    write_npz(read_trace(folder / "trace.parquet"), tmp_path / "dump.npz")
    words = ["trace", "import", str(tmp_path / "dump.npz"), "-o", str(tmp_path / "out.parquet")]
    every: list[dict[str, Any]] = [{}, {"format": "arrays", "model": str(folder / "config.json")}]
    for arguments in every:
        options = [word for name, value in arguments.items() for word in (f"--{name}", value)]
        assert main([*words, *options]) == 0
        found, expected = trimtab.import_dump(tmp_path / "dump.npz", **arguments), read_trace(tmp_path / "out.parquet")
        np.testing.assert_array_equal(np.sort(found.expert_ids), np.sort(expected.expert_ids))
        assert (found.model, found.steps.tolist()) == (expected.model, expected.steps.tolist())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "magic"}, "unknown format magic"),
        ({"top_k": 0}, "top_k: 0 should be a whole number of at least 1"),
        ({"overrides": {"num_experts": 3}}, "--set num_experts: needs --model"),
        ({"model": "qwen3-30b-a3b", "top_k": 2}, "--top-k is 2; qwen3-30b-a3b has 8"),
        ({"model": ModelSpec.named("qwen3-30b-a3b"), "num_experts": 9}, "--num-experts is 9; qwen3-30b-a3b has 128"),
        ({"step_from": "step"}, "step_from: 'step' has 0 groups; it should have one"),
        ({"source": "absent.jsonl"}, "absent.jsonl: no such file"),
    ],
)
def test_wrong_arguments_of_an_import_are_one_line(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        trimtab.import_dump(**{"source": tmp_path / "a.jsonl"} | arguments)
    assert "\n" not in str(caught.value)


def test_steps_of_one_trace_are_compared() -> None:
    trace = made()
    first, second = (trimtab.analyze(trace, trimtab.Run(ranks=4, token_budget=64, step=step)) for step in (0, 1))
    compared = first.compare(second)
    content = compared.figures()
    assert [content[key]["steps"] for key in "ab"] == [[0], [1]]
    assert content["difference"]["expert_time_lost"] == (
        second.figures()["expert_time_lost"] - first.figures()["expert_time_lost"]
    )
    assert repr(compared).startswith("AnalysisComparison: ")
    with pytest.raises(InputError, match="use the same ranks"):
        first.compare(trimtab.analyze(trace, trimtab.Run(ranks=2, step=1)))
