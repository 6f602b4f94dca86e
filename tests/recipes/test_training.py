"""Small runs of the recipe: the files that they write, and one line for options that don't fit."""

from __future__ import annotations

import gzip
import json
import re
import sys
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.runs import metrics_of, save_tiny_model, train_command
from helpers.runs import run as run_command
from recipes.rl.train import main
from trimtab import read_trace
from trimtab.cluster.specs import RING_LAYERS

SMALL = ["--warm-start-steps", "12", "--held-out", "16", "--problems", "16", "--token-budget", "256"]


def command(out: Path, *more: str) -> list[str]:
    return train_command(out, *SMALL, *more)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("run") / "out"
    more = ["--steps", "2", "--save-every", "1", "--compare-pairs", "2", "--samples", "16", "--expert-width", "2048"]
    return out, run_command(command(out, *more))


def test_replay_is_exact_and_every_micro_step_is_planned(run: tuple[Path, str]) -> None:
    out, _ = run
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [0, 1]
    for m in metrics:
        # In bfloat16 the rollout is not exact.
        assert 0 < m["ppo/rollout_logprob_diff"] < 0.1
        assert m["moe/unplanned_micro_steps"] == 0
        # Of 16 problems with 16 samples each a whole number is solved.
        assert m["reward"] * 256 == pytest.approx(round(m["reward"] * 256), abs=1e-6)
        assert 0 < m["planning_s"] < m["prepare_s"]
        assert min(m["rollout_s"], m["recompute_s"], m["update_s"], m["sync_s"]) > 0.001
        # On two ranks. Experts have three matrices [2048, 128] in float32; slots for two replicas of each ring layer.
        assert m["transfer/exposed_s"] < 2 * (m["recompute_s"] + m["update_s"])
        expert_bytes = 3 * 2048 * 128 * 4
        moved = {kind: m[f"transfer/{kind}_bytes"] for kind in ("peer", "host", "gradient")}
        assert all(value % expert_bytes == 0 for value in moved.values())
        has_replicas = m["moe/replicas"] > 0
        assert (moved["gradient"] > 0) == (moved["peer"] + moved["host"] > 0) == has_replicas
        assert m["memory/pool_bytes"] % expert_bytes == 0
        assert m["memory/pool_bytes"] >= RING_LAYERS * 2 * expert_bytes
    assert any(m["moe/replicas"] > 0 and m["moe/max_vio_after"] < m["moe/max_vio_before"] for m in metrics)


def test_routing_and_checkpoints_can_be_read(run: tuple[Path, str]) -> None:
    out, _ = run
    for step in (0, 1):
        trace = read_trace(out / "routing" / f"step-{step:05d}.parquet")
        assert set(trace.steps.tolist()) <= {step}
        assert (trace.num_layers, trace.num_experts, trace.top_k) == (2, 8, 1)
    checkpoints = sorted((out / "checkpoints").iterdir())
    assert [c.name for c in checkpoints] == ["step-00000", "step-00001", "step-00002"]
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoints[-1])
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoints[-1])
    logits = model(**tokenizer("1+2=", return_tensors="pt")).logits
    assert torch.isfinite(logits).all()
    assert list((out / "tensorboard").glob("events*"))


def test_the_summary_compares_policies_and_accuracies(run: tuple[Path, str]) -> None:
    out, printed = run
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["held_out_accuracy"]) == {"after warm start", "after 2 GRPO steps"}
    comparison = summary["comparison"]
    static, trimtab = comparison["static"], comparison["trimtab"]
    assert trimtab["max_vio"] < static["max_vio"]
    assert static["replicas"] == 0
    assert trimtab["replicas"] > 0
    assert len(static["step_s"]) == len(trimtab["step_s"]) == 2
    for policy in (static, trimtab):
        assert 0 < policy["waited_s"] <= policy["median_s"]
    # Rounding only: both trainers have the weights of the last checkpoint, and train the same responses.
    assert comparison["loss_difference"] < 1e-5
    assert comparison["norm_difference"] < 1e-3
    assert "Held-out accuracy" in printed
    for text in (f"{static['median_s']:.3f} s", f"{trimtab['median_s']:.3f} s", "95% interval", "losses differ by"):
        assert text in " ".join(printed.split())


def test_the_report_shows_the_measured_figures(run: tuple[Path, str]) -> None:
    out, printed = run
    assert "report.html" in printed
    page = (out / "report.html").read_text()
    summary = json.loads((out / "summary.json").read_text())["comparison"]
    assert f"{summary['speedup']:.2f} times as fast" in page
    assert "{:.2f} to {:.2f}".format(*summary["speedup_interval"]) in page
    assert f"{summary['trimtab']['replicas']:,} replicas" in page
    # One imbalance, that of the answer, also in the table.
    assert all(f">{1 + summary[policy]['max_vio']:.3f}<" in page for policy in ("static", "trimtab"))
    for text in ("planning, training waited", "planning during the rollout", "waiting for the busiest rank"):
        assert text in page
    events = json.loads(gzip.decompress((out / "timeline.json.gz").read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [re.sub(r"\d+, rank", "N, rank", name) for name in processes.values()] == [
        f"{name}, update of micro-step N, rank {rank}" for name in ("static", "trimtab") for rank in (0, 1)
    ]
    for process in processes:
        # Experts of every layer run once forward and once backward, in order.
        work = [e for e in events if e["ph"] == "X" and e["pid"] == process]
        for kind, layers in (("experts", [0, 1]), ("experts, backward", [1, 0])):
            mine = sorted((e["ts"], e["args"]["layer"]) for e in work if e["name"] == kind)
            assert [layer for layer, _ in groupby(layer for _, layer in mine)] == layers


@pytest.mark.nightly
def test_a_checkpoint_can_be_trained_on_under_torchrun(run: tuple[Path, str], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    more = ["--model", str(run[0] / "checkpoints" / "step-00002"), "--warm-start-steps", "0", "--steps", "1"]
    more += ["--mode", "static", "--compare-pairs", "0"]
    run_command([*torchrun, *command(tmp_path / "out", *more)[1:]])
    assert (tmp_path / "out" / "summary.json").exists()
    (metrics,) = metrics_of(tmp_path / "out")
    assert metrics["ppo/rollout_logprob_diff"] < 0.1
    assert metrics["moe/replicas"] == metrics["moe/unplanned_micro_steps"] == 0


@pytest.mark.nightly
def test_a_run_can_be_balanced_from_live_routing(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    out = tmp_path / "out"
    few = ["--warm-start-steps", "2", "--held-out", "8", "--problems", "2", "--samples", "2", "--steps", "1"]
    run_command(train_command(out, "--model", str(tmp_path / "model"), *few, "--mode", "live", "--policy", "quota"))
    (metrics,) = metrics_of(out)
    written = json.loads((out / "settings.json").read_text())
    assert (written["mode"], written["policy"]) == ("live", "quota")
    # Two layers, in recompute and update.
    assert metrics["live/calls"] == 2 * metrics["moe/micro_steps"]
    assert {"live/max_vio_before", "live/max_vio_after", "live/replicas"} <= metrics.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--windo 3", "unknown option --windo; did you mean --window?"),
        ("--steps -1", "'-1' should be a whole number of at least 0"),
        ("--algorithm pp", "unknown --algorithm pp; did you mean ppo?"),
        ("--value-model trunk", "--value-model trunk: grpo has no value model; use --algorithm ppo or t-ppo"),
        ("--problems 1", "--problems is 1; each of the 2 ranks needs at least one"),
        ("--ranks 3", "3 ranks don't divide 8 experts"),
        ("--model /nowhere", "/nowhere: no config.json there; --model should be a Hugging Face checkpoint directory"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (["--output", str(tmp_path / "out")], []):
        with suppress(SystemExit):
            assert main([*folder, *words.split()]) == 2
        error = capsys.readouterr().err
        assert message in error or (not folder and "the following arguments are required: -o/--output" in error)
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    (tmp_path / "out" / "notes").mkdir(parents=True)
    assert main(["--output", str(tmp_path / "out")]) == 2
    assert "is there already and not empty; name a new folder" in capsys.readouterr().err
