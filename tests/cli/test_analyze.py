"""`trimtab analyze`: its output and its files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.traces import odd_trace
from trimtab import InputError, RoutingTrace, write_trace
from trimtab.api.model_choice import model_or_none
from trimtab.cli.main import main
from trimtab.trace import synthesize


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of one trace, and odd ones in folders of their own."""
    trace = synthesize(num_sequences=48, sequence_length=32, num_layers=2, num_experts=16, top_k=4, zipf=0.9)
    domains = np.array(["maths", "[code]"])[np.arange(48) % 2]
    trace = replace(trace, steps=np.repeat([0, 1, 2], 16).astype(np.int32), domains=domains)
    write_trace(trace.part(0, 20), tmp_path / "run" / "0.parquet")
    write_trace(trace.part(20, 48), tmp_path / "run" / "1.parquet")
    write_trace(odd_trace(2, layers=1, steps=1, sequences=3), tmp_path / "odd.parquet")
    write_trace(RoutingTrace.from_sequences([[[[0]]]], num_experts=1), tmp_path / "one.parquet")
    return tmp_path


def test_analyze_prints_the_answer_and_writes_json_and_html(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ["--json", str(folder / "out" / "a.json"), "--html", str(folder / "out" / "a.html")]
    size = ["--ranks", "4", "--ranks-per-node", "2", "--token-budget", "64"]
    assert main(["analyze", str(folder / "run" / "*.parquet"), *size, *outputs]) == 0
    printed, notes = capsys.readouterr()
    content = json.loads((folder / "out" / "a.json").read_text())
    assert content["schema"] == "trimtab-analyze-2"
    ratio, lost = content["max_vio"]["mean"] + 1, content["expert_time_lost"]
    opening = f"On 4 ranks the busiest computes {ratio:.2f} times the mean, and on average a rank is idle for"
    assert " ".join(printed.split()).startswith(f"{opening} {lost:.0%}")
    for words in ("[code]", "Does known routing help?", "max_vio of nodes", "3 steps, 0 to 2"):
        assert words in printed
    assert f"page: {folder / 'out' / 'a.html'}\n" in notes
    assert [content[key] for key in ("steps", "sequences", "tokens", "unknown_routes")] == [[0, 1, 2], 48, 48 * 32, 0]
    assert len(content["by_micro_step"]) == content["micro_steps"] == 6
    assert [each["layer"] for each in content["by_layer"]] == content["layers"] == [0, 1]
    assert {each["name"] for each in content["domains"]} == {"maths", "[code]"}
    assert content["placements"]["history"] == "step"
    assert content["estimate"] is None
    page = (folder / "out" / "a.html").read_text()
    assert " ".join(page.split("<h1>")[1].split("</h1>")[0].split()).startswith(f"{opening} {lost:.0%}")
    assert {path.name for path in (folder / "out").iterdir()} == {"a.json", "a.html"}


def test_analyze_needs_only_a_file(folder: Path, printed: Callable[..., str]) -> None:
    text = " ".join(printed("analyze", folder / "odd.parquet").split())
    assert "For 8 ranks, since --ranks is not given." in text
    assert "have no recorded route and are not counted" in text
    assert "nan" not in text
    assert "One rank computes all experts" in printed("analyze", folder / "one.parquet", "--html", folder / "one.html")


def test_estimate_in_seconds_for_a_preset_like_the_trace(folder: Path, tmp_path: Path) -> None:
    trace = synthesize(num_sequences=16, sequence_length=64, num_layers=2, num_experts=128, top_k=8, zipf=0.9)
    write_trace(trace, tmp_path / "t.parquet")
    assert (
        main(
            [
                "analyze",
                str(tmp_path / "t.parquet"),
                "--json",
                str(tmp_path / "a.json"),
                "--micro-steps",
                "2",
                "--ranks",
                "8",
            ]
        )
        == 0
    )
    content = json.loads((tmp_path / "a.json").read_text())
    estimate = content["estimate"]
    assert content["micro_steps"] == 2
    assert estimate["model"] == "qwen3-30b-a3b"
    # The model has 24 times the layers of the trace.
    assert (estimate["layers_traced"], estimate["layers_of_model"]) == (2, 48)
    assert estimate["lost_s"] == pytest.approx(24 * sum(estimate["lost_s_by_layer"]))
    assert 0 < estimate["lost_part"] < 1


def test_no_estimate_for_a_model_with_fewer_layers_than_the_trace(tmp_path: Path) -> None:
    many = RoutingTrace.from_sequences([], num_experts=128, shape=(61, 8))
    assert model_or_none("t.parquet", many, None) is None
    with pytest.raises(InputError, match=r"t\.parquet is not of model qwen3-30b-a3b: the trace has 61 MoE layers"):
        model_or_none("t.parquet", many, "qwen3-30b-a3b")


def test_two_traces_are_compared_in_text_json_and_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = synthesize(num_sequences=40, sequence_length=32, num_layers=2, num_experts=16, top_k=4, zipf=0.2, seed=3)
    write_trace(trace, folder / "other.parquet")
    command = ["analyze", str(folder / "run"), "--compare", str(folder / "other.parquet"), "--ranks", "4"]
    outputs = {name: folder / "out" / f"c.{name}" for name in ("json", "html")}
    options = [word for name, path in outputs.items() for word in (f"--{name}", str(path))]
    assert main([*command, "--token-budget", "64", *options]) == 0
    printed, notes = capsys.readouterr()
    assert max(map(len, printed.splitlines())) <= 80
    content = json.loads(outputs["json"].read_text())
    assert content["schema"] == "trimtab-compare-2"
    assert [[Path(file).name for file in files] for files in content["traces"]] == [
        ["0.parquet", "1.parquet"], ["other.parquet"],
    ]  # fmt: skip
    alone = {}
    for key, source in (("a", folder / "run"), ("b", folder / "other.parquet")):
        assert main(["analyze", str(source), "--ranks", "4", "--token-budget", "64", "--json", "-"]) == 0
        alone[key] = json.loads(capsys.readouterr().out)
        assert content[key]["expert_time_lost"] == alone[key]["expert_time_lost"]
        assert content[key]["max_vio_mean"] == alone[key]["max_vio"]["mean"]
        assert content[key]["sequences"] == alone[key]["sequences"]
    change = 100 * (alone["b"]["expert_time_lost"] - alone["a"]["expert_time_lost"])
    assert f"{change:+.1f} points" in printed
    page = outputs["html"].read_text()
    assert json.loads(page.split('id="result">')[1].split("</script>")[0]) == content
    assert f"page: {outputs['html']}\n" in notes


def test_traces_of_other_shapes_are_refused_before_anything_is_counted(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.cli.analyze._analyzed", None)
    assert main(["analyze", str(folder / "run"), "--compare", str(folder / "odd.parquet")]) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.count("\n") == 1
    assert "2 MoE layers (0 to 1) of 16 experts" in error
    assert "1 MoE layer (3) of 8 experts" in error
    assert main(["analyze", str(folder / "run"), "--compare", str(folder / "none.parquet")]) == 2
    assert "none.parquet: no such file" in capsys.readouterr().err


def test_a_compared_trace_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = str(folder / "odd.parquet")
    assert main(["analyze", str(folder / "run"), "--compare", other, "--json", other]) == 2
    assert "to be read and written" in capsys.readouterr().err


def test_one_of_anything_is_singular(folder: Path, tmp_path: Path, printed: Callable[..., str]) -> None:
    one, page = folder / "one.parquet", tmp_path / "page.html"
    single = synthesize(num_sequences=1, sequence_length=32, num_layers=1, num_experts=8, top_k=2, zipf=0.5)
    write_trace(single, tmp_path / "single.parquet")
    single_file = tmp_path / "single.parquet"
    commands = [
        ("analyze", one), ("analyze", one, "--compare", one), ("analyze", single_file, "--ranks", "2"),
        ("plan", single_file, "--ranks", "2", "--slots", "1"), ("trace", "info", single_file),
        ("simulate", single_file, "--ranks", "2", "--slots", "1", "--policy", "static", "--model", "mixtral-8x7b"),
        ("simulate", single_file, "--ranks", "1", "--policy", "static", "--model", "mixtral-8x7b"),
    ]  # fmt: skip
    for command in commands:
        texts = [printed(*command, *(("--html", page) if command[0] in ("analyze", "simulate") else ()))]
        if page.exists():
            texts.append(re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]*>", "\n", page.read_text(), flags=re.S))
        for text in texts:
            assert re.findall(r"(?<![\d.,×/] )(?<![\d.,-])\b1 (?!needs)[A-Za-z-]+s\b", text) == [], command
