"""No command lets a name from a file control the terminal."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.hostile_names import NAMES
from trimtab import read_trace
from trimtab.cli.main import main
from trimtab.trace import write_trace

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
NAME = "".join(name for kind, name in NAMES.items() if kind not in ("long", "not UTF-8"))


@pytest.fixture
def folder(trace_file: Path, tmp_path: Path) -> Path:
    """A trace, a model and a cluster with hostile names; some of them in a folder with a hostile name."""
    trace = read_trace(trace_file)
    domains = np.array([NAME[s % 2 :][:250] for s in range(trace.num_sequences)])
    write_trace(replace(trace, model=NAME[:250], domains=domains), tmp_path / "trace.parquet")
    config = {
        "model_type": NAME, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 2, NAME: NAME,
        "hidden_size": 2048, "moe_intermediate_size": 1024, "rope_scaling": {NAME: 1},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "bad.json").write_text(json.dumps({**config, "num_experts": NAME}))
    (tmp_path / "dump.jsonl").write_text(json.dumps({NAME: NAME, "routed_experts": NAME}))
    (tmp_path / "cluster.toml").write_text(f'format = {json.dumps(NAME)}\nname = "ours"\n')
    other = tmp_path / "a\x1b]0;b\x07c"
    other.mkdir()
    (other / "x\x1b[2J.parquet").write_bytes(b"PAR1")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ["trace", "info", "trace.parquet"],
        ["analyze", "trace.parquet", "--ranks", "4"],
        ["plan", "trace.parquet", "--ranks", "4", "--token-budget", "512"],
        ["simulate", "trace.parquet", "--ranks", "4", "--micro-steps", "2", "--model", "config.json"],
        ["simulate", "trace.parquet", "--ranks", "4", "--model", "bad.json"],
        ["simulate", "trace.parquet", "--ranks", "4", "--cluster", "cluster.toml"],
        ["trace", "import", "dump.jsonl", "-o", "new.parquet", "--format", "vllm", "--num-experts", "8"],
        ["trace", "info", "a\x1b]0;b\x07c/x\x1b[2J.parquet"],
        ["trace", "info", NAME],
    ],
)
def test_output_has_no_control_characters(
    command: list[str], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    status = main(command)
    shown = capsys.readouterr()
    assert status in (0, 2)
    assert shown.out or shown.err
    assert not CONTROL.findall(shown.out + shown.err)
    # Nor do they begin a line of a message.
    assert not re.search(r"^z", shown.err, re.MULTILINE)
    assert "\nalert" not in shown.err


def test_a_timeline_has_no_control_characters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = ["simulate", "trace.parquet", "--ranks", "4", "--micro-steps", "2", "--model", "config.json"]
    assert main([*words, "--perfetto", "timeline.json.gz"]) == 0
    assert not CONTROL.findall(gzip.decompress(Path("timeline.json.gz").read_bytes()).decode().replace("\t", ""))
