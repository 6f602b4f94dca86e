"""`trimtab advise`: its output and its files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trimtab import write_trace
from trimtab.cli.main import main
from trimtab.trace import PRESETS, synthesize_preset


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    steps = synthesize_preset(
        PRESETS["qwen3-30b-math"], num_sequences=48, mean_length=128, max_length=256, num_layers=2, num_steps=2
    )
    write_trace(steps, tmp_path / "t.parquet")
    return tmp_path / "t.parquet"


def test_advise_prints_a_recommendation_in_80_columns_and_writes_files(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = trace.parent / "out"
    words = [
        "--ranks",
        "8",
        "--step-tokens",
        "20k",
        "--micro-steps",
        "4",
        "--draws",
        "1",
        "--gpu-hour",
        "2",
        "--sharding",
        "fsdp",
    ]
    assert main(["advise", str(trace), *words, "--json", str(out / "a.json"), "--html", str(out / "a.html")]) == 0
    printed, notes = capsys.readouterr()
    content = json.loads((out / "a.json").read_text())
    assert content["schema"] == "trimtab-advise-1"
    assert " ".join(printed.split()).startswith(content["recommendation"])
    assert all(len(line) <= 80 for line in printed.splitlines())
    for name in content["strategies"]:
        assert f"\n{name} " in printed
    for text in ("From static to ", "GPU hours of 1,000 steps", "money", "interval", "own error"):
        assert text in printed
    answer = next(line for line in notes.splitlines() if line.startswith("first answer: a step takes "))
    assert re.findall(r"([a-z ]+) [\d.]+ m?s", answer.partition("takes")[2]) == [
        " nothing", " eplb", " all", " even routing"
    ]  # fmt: skip
    assert f"page: {out / 'a.html'}\n" in notes
    page = (out / "a.html").read_text()
    assert content["recommendation"].split(" (")[0] in page
    tiles = page.partition('<dl class="tiles">')[2].partition("</dl>")[0]
    assert tiles.count("<dt>") == 4
    shown = content["strategies"][content["verdict"]]
    hours, less = (each["gpu_hours_of_1000_steps"] for each in (content["strategies"]["nothing"], shown))
    saved = re.findall(r"saves ([\d.,]+) GPU hours", content["recommendation"])
    assert [float(text) for text in saved] == [pytest.approx(hours - less, rel=0.005, abs=0.005)]
    gain = 1 - 1 / shown["speedup"]["value"]
    for figure in (f"<b>{gain:.0%}</b>", f"{shown['over_eplb']['value']:.2f}x as fast as eplb", "<b>48 sequences</b>"):
        assert figure in tiles
    assert f"it {'fits' if shown['fits'] else 'does not fit'}<" in tiles
    assert {path.name for path in out.iterdir()} == {"a.json", "a.html"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--step-tokens", "many"], "'many' should be a number of tokens, such as 20M"),
        (["--step-tokens", "-5"], "'-5' should be a number of tokens"),
        (["--step-tokens", "inf"], "'inf' should be a number of tokens"),
        (["--sampled", "2"], "'2' should be above 0, and at most 1"),
        (["--sampled", "nan"], "'nan' should be above 0"),
        (["--sampled", "0.5", "--step-tokens", "20k"], "not allowed with argument"),
        (["--step-tokens", "1k"], "--step-tokens 1000: step 0 of "),
        (["--ranks", "7"], "--ranks 7 doesn't divide the 128 experts"),
        (["--tp", "3"], "--tp 3 doesn't divide the 32 attention heads of qwen3-30b-a3b; use 2 or 4"),
        (["--ranks", "8", "--cp", "3"], "doesn't divide the 8 ranks of a stage"),
        (["--pp", "64"], "--pp 64: qwen3-30b-a3b has 48 layers; use 48 or less"),
        (["--pp", "0"], "'0' should be a whole number of at least 1"),
        (["--gpu-hour", "-1"], "'-1' should be a price, 0 or more"),
    ],
)
def test_bad_input_is_one_line(trace: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["advise", str(trace), "--model", "qwen3-30b-a3b", *words])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    text = capsys.readouterr().err
    assert reason in text
    assert text.count("\n") == 1
