"""`trimtab calibrate`: a tiny calibration, and the cluster made of its figures."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from trimtab.calibration.calibration_result import CalibrationResult, Figure, link_figures
from trimtab.cli.main import main
from trimtab.cluster import ClusterSpec, load_cluster, write_cluster

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
NOT_MEASURED = {"ranks", "ranks_per_node", "slots_per_rank", "mirror_experts", "name", "dispatch_forwards"}


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
    assert "expert_flops" in capsys.readouterr().out
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
    assert "there was one node" in content["network_bytes_per_s"]["source"]
    taken = json.loads(figures.read_text())
    assert taken["schema"] == "trimtab-calibrate-1"
    assert set(taken["figures"]) == {field.name for field in fields(ClusterSpec)} - NOT_MEASURED
    assert taken["figures"]["copy_s"]["preset"] == load_cluster("local-cpu", ranks=2).copy_s


def example_figures() -> dict[str, Figure]:
    preset = ClusterSpec(1, 1)
    return {name: Figure(value * 1.2345) for name, value in asdict(preset).items() if name not in NOT_MEASURED}


def test_figures_become_a_cluster_with_sources(tmp_path: Path) -> None:
    figures = example_figures() | {
        "copy_s": Figure(0.0, "lost in noise"),
        "dispatch_s": Figure(3e-5, "one rank", measured=False),
    }
    preset = ClusterSpec(8, 4, name="guessed")
    result = CalibrationResult.of(figures, {}, name="ours", preset=preset, machine="abacus, 8 ranks, torch 3")
    assert (result.cluster.ranks, result.cluster.ranks_per_node, result.cluster.name) == (8, 4, "ours")
    assert result.cluster.expert_flops == 4.94e14
    assert result.cluster.tile_rows == 158
    assert result.cluster.copy_s == 0
    assert not result.cluster.dispatch_forwards
    assert result.sources["expert_flops"] == "measured by trimtab calibrate on abacus, 8 ranks, torch 3"
    assert result.sources["copy_s"].endswith("torch 3; lost in noise")
    assert "that of guessed" in result.sources["dispatch_s"]
    write_cluster(tmp_path / "ours.toml", result.cluster, result.sources)
    assert load_cluster(tmp_path / "ours.toml", ranks=8) == replace(result.cluster, slots_per_rank=2)


def test_missing_links_get_the_figures_of_existing_ones() -> None:
    preset = ClusterSpec(1, 1, node_bytes_per_s=7e9, network_bytes_per_s=5e9)
    names = ("node_bytes_per_s", "network_bytes_per_s")
    near, far = Figure(2e9, "noted"), Figure(1e9)
    assert link_figures(names, near, far, preset) == {names[0]: near, names[1]: far}
    one_node = link_figures(names, near, None, preset)
    assert one_node[names[0]] == near
    assert (one_node[names[1]].value, one_node[names[1]].note) == (2e9, "there was one node: that inside it; noted")
    assert link_figures(names, None, far, preset)[names[0]].value == 1e9
    alone = link_figures(names, None, None, preset)
    assert [alone[name].value for name in names] == [7e9, 5e9]
    assert not any(figure.measured for figure in alone.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "{folder}"], "a folder; name the file to write"),
        (["-o", "{config}/local.toml"], "config.json is not a folder"),
        (["-o", "{folder}/local.toml", "--json", "{folder}"], "a folder; name the file to write"),
        (["-o", "{folder}/local.toml", "--model", "absent"], "absent: neither a model that comes with Trimtab"),
        (
            ["-o", "{folder}/local.toml", "--model", "kimi-k2"],
            "model type 'kimi_k2' can't be run; use one of qwen3_moe",
        ),
        (["-o", "{folder}/local.toml", "--rounds", "0"], "'0' should be a whole number of at least 1"),
        ([], "the following arguments are required: -o/--out"),
    ],
)
def test_mistakes_get_one_line_and_status_2(
    arguments: list[str], message: str, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"config": config_file, "folder": tmp_path}
    try:
        status: int | str | None = main(["calibrate", *(argument.format(**places) for argument in arguments)])
    except SystemExit as exit_:
        status = exit_.code
    error = capsys.readouterr().err
    assert status == 2
    assert message in error
    assert len(error.splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
