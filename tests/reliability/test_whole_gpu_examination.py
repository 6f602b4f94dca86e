"""`trimtab doctor --gpu` as a whole: all stages on two CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

from trimtab.cli.main import main
from trimtab.doctor.gpu.gpu_examination import STAGES


def test_the_whole_command(tmp_path: Path) -> None:
    assert main(["doctor", "--gpu", "--ranks", "2", "--json", str(tmp_path / "gpu.json")]) == 3
    figures = json.loads((tmp_path / "gpu.json").read_text())
    assert [stage["name"] for stage in figures["stages"]] == [stage.name for stage in STAGES]
    unusual = [finding for stage in figures["stages"] for finding in stage["findings"] if finding["status"] != "ok"]
    assert [finding["name"] for finding in unusual] == ["device"]
