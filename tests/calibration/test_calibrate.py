"""`trimtab calibrate`: a tiny calibration, and the cluster made of its figures."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from trimtab.calibration.calibration_result import (
    MEASURABLE,
    CalibrationResult,
    Figure,
    calibration_table,
    fitted_cost,
    fitted_rate,
)
from trimtab.calibration.fits import Fit
from trimtab.cli.main import main
from trimtab.cluster import ClusterSpec, load_cluster, write_cluster
from trimtab.cluster.presets import preset_like

CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
# What one node on a CPU can't measure.
NOT_MEASURED = {"tile_rows", "network_bytes_per_s", "dispatch_network_bytes_per_s"}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "config.json"


def test_a_calibration_of_two_ranks_is_written_and_read_back(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, figures = tmp_path / "new" / "tiny.toml", tmp_path / "tiny.json"
    arguments = ["calibrate", "-o", str(out), "--model", str(config_file), "--ranks", "2", "--rounds", "2"]
    assert main([*arguments, "--json", str(figures)]) == 0
    printed = capsys.readouterr()
    assert "expert_flops" in printed.out
    assert "not measured, so not written: " in printed.err
    assert all(name in printed.err for name in NOT_MEASURED)
    assert [file.name for file in out.parent.iterdir()] == ["tiny.toml"]
    cluster = load_cluster(out, ranks=2)
    assert (cluster.name, cluster.ranks, cluster.ranks_per_node, cluster.tile_rows) == ("tiny", 2, 2, 1)
    # Wide bounds: any machine from a small board to a large server.
    assert 1e7 < cluster.expert_flops < 1e14
    assert 1e7 < cluster.dense_flops < 1e14
    assert 1e8 < cluster.memory_bytes_per_s < 1e13
    assert 1e6 < cluster.dispatch_node_bytes_per_s < 1e12
    assert 0.2 < cluster.expert_backward < 20
    content = tomllib.loads(out.read_text())
    for name in ("expert_flops", "node_bytes_per_s", "host_bytes_per_s", "layer_s"):
        assert content[name]["source"].startswith("measured by trimtab calibrate on ")
        assert ", 2 ranks, torch " in content[name]["source"]
    # The file has nothing that was not measured; it names the preset that has it.
    assert NOT_MEASURED.isdisjoint(content)
    assert content["base"] == "local-cpu"
    assert cluster.network_bytes_per_s == load_cluster("local-cpu", ranks=2).network_bytes_per_s
    taken = json.loads(figures.read_text())
    assert taken["schema"] == "trimtab-calibrate-2"
    assert set(taken["figures"]) == set(MEASURABLE) - NOT_MEASURED
    assert set(taken["not_measured"]) == NOT_MEASURED
    assert taken["figures"]["copy_s"]["preset"] == load_cluster("local-cpu", ranks=2).copy_s


def test_one_rank_measures_no_links_to_others(config_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.toml"
    assert main(["calibrate", "-o", str(out), "--model", str(config_file), "--ranks", "1", "--rounds", "1"]) == 0
    content = tomllib.loads(out.read_text())
    links = {"node_bytes_per_s", "network_bytes_per_s", "dispatch_node_bytes_per_s", "dispatch_network_bytes_per_s"}
    assert set(MEASURABLE) - set(content) == {"tile_rows", "dispatch_s", *links}
    assert load_cluster(out, ranks=1).node_bytes_per_s == load_cluster("local-cpu", ranks=1).node_bytes_per_s


def example_figures() -> dict[str, Figure | None]:
    preset = asdict(ClusterSpec(1, 1))
    return {name: Figure(preset[name] * 1.2345) for name in MEASURABLE}


def result_of(changed: dict[str, Figure | None]) -> CalibrationResult:
    preset = load_cluster("h100x8", ranks=8, ranks_per_node=4)
    return CalibrationResult.of(
        example_figures() | changed, {}, name="ours", preset=preset, machine="abacus, 8 ranks, torch 3"
    )


def test_figures_become_a_cluster_with_sources(tmp_path: Path) -> None:
    result = result_of({"copy_s": Figure(0.0, "lost in noise"), "dispatch_s": None})
    assert (result.cluster.ranks, result.cluster.ranks_per_node, result.cluster.name) == (8, 4, "ours")
    assert result.cluster.expert_flops == 4.94e14
    assert result.cluster.tile_rows == 158
    assert result.cluster.copy_s == 0
    assert result.cluster.dispatch_s == load_cluster("h100x8", ranks=8).dispatch_s
    assert not result.cluster.dispatch_forwards
    assert result.sources["expert_flops"] == "measured by trimtab calibrate on abacus, 8 ranks, torch 3"
    assert result.sources["copy_s"].endswith("torch 3; lost in noise")
    assert "dispatch_s" not in result.sources
    (warning,) = result.warnings
    assert warning.startswith('not measured, so not written: dispatch_s; the file has base = "h100x8"')
    write_cluster(tmp_path / "ours.toml", result.cluster, result.sources, base=result.preset.name)
    assert "[dispatch_s]" not in (tmp_path / "ours.toml").read_text()
    assert load_cluster(tmp_path / "ours.toml", ranks=8) == result.cluster


def test_a_fit_that_is_off_by_more_than_10_percent_gets_a_warning(tmp_path: Path) -> None:
    good, poor = Fit((1e14,), (2e-6,), error=0.1), Fit((2e13,), (0.0,), error=0.137, note="work over time")
    result = result_of({
        "expert_flops": fitted_rate(good), "copy_s": fitted_cost(good),
        "dense_flops": fitted_rate(poor), "layer_s": fitted_cost(poor),
    })  # fmt: skip
    (warning,) = result.warnings
    assert warning.startswith("fits off by more than 10%: dense_flops 14%, layer_s 14%; ")
    assert result.sources["dense_flops"].endswith("torch 3; work over time; the fit is off by 14%")
    assert "off by" not in result.sources["expert_flops"] + result.sources["memory_bytes_per_s"]
    console = Console(width=200, force_terminal=True, color_system="standard")
    with console.capture() as printed:
        console.print(calibration_table(result))
    (line,) = [line for line in printed.get().splitlines() if "dense_flops" in line and "13.7%" in line]
    assert "20.0 TFLOP/s" in line
    assert "\x1b[33m" in line
    assert not result_of({}).warnings


PRESETS = {
    "NVIDIA H100 80GB HBM3": "h100x8", "NVIDIA H200": "h200x8", "NVIDIA H20": "h20x8", "NVIDIA H800": "h800x8",
    "NVIDIA A100-SXM4-80GB": "a100x8", "NVIDIA B200": "b200x8", "NVIDIA GB200": "gb200-nvl72",
    "AMD Instinct MI300X": "mi300x8", "NVIDIA L40S": "h100x8",
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "preset"), PRESETS.items())
def test_the_preset_of_a_gpu_is_found_by_its_name(gpu: str, preset: str) -> None:
    assert preset_like(gpu) == preset
