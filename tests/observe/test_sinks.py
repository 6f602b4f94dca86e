"""Sinks: what arrives at files, and at the released TensorBoard, Weights & Biases and MLflow, without a network."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.observe import JsonLines, MLflow, PrometheusText, Sink, TensorBoard, WandB

FIGURES = {3: {"rollout/moe/idle_share": 0.25, "timing_s/moe_observe": 0.5}, 4: {"rollout/moe/idle_share": 0.125}}


def send(make: Callable[[], Sink]) -> None:
    """Make a sink here, and use it in another thread, as the observer does."""
    sink, failed = make(), []

    def use() -> None:
        try:
            for step, figures in FIGURES.items():
                sink(figures, step)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert not failed


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.jsonl"
    for _ in range(2):
        send(lambda: JsonLines(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == 2 * [{"step": step, **figures} for step, figures in FIGURES.items()]


def test_prometheus_text(tmp_path: Path) -> None:
    path = tmp_path / "trimtab.prom"
    send(lambda: PrometheusText(path, {"run": 'a "b"\\c\nd'}))
    gauges = {}
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# TYPE [a-zA-Z_][a-zA-Z0-9_]* gauge", line)
            continue
        name, labels, value = re.fullmatch(r"([a-z_]+)(\{.*\}) (\S+)", line).groups()  # type: ignore[union-attr]
        assert labels == r'{run="a \"b\"\\c\nd"}'
        gauges[name] = float(value)
    assert gauges == {"trimtab_step": 4, "trimtab_rollout_moe_idle_share": 0.125}
    assert path.read_text().endswith("\n")
    assert [path] == list(tmp_path.iterdir())


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send(lambda: TensorBoard(tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {"rollout/moe/idle_share": [(3, 0.25), (4, 0.125)], "timing_s/moe_observe": [(3, 0.5)]}


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with pytest.raises(ValueError, match="no run of MLflow is active"):
        MLflow()
    mlflow.set_tracking_uri(f"file:{tmp_path}/runs")
    with mlflow.start_run() as run:
        send(MLflow)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "rollout/moe/idle_share")
    assert [(each.step, each.value) for each in history] == [(3, 0.25), (4, 0.125)]
    assert len(mlflow.search_runs(output_format="list")) == 1


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with pytest.raises(ValueError, match="no run of Weights & Biases is active"):
        WandB()
    run = wandb.init(project="trimtab", dir=tmp_path)
    # The framework has logged later steps.
    run.log({"loss": 1.0}, step=9)
    defined: list[str] = []
    define = run.define_metric

    def count(name: str, **axis: Any) -> Any:
        defined.append(name)
        return define(name, **axis)

    monkeypatch.setattr(run, "define_metric", count)
    send(WandB)
    assert sorted(defined) == ["rollout/moe/idle_share", "timing_s/moe_observe"]
    summary = dict(run.summary)
    run.finish()
    assert summary["rollout/moe/idle_share"] == 0.125
    assert summary["moe/step"] == 4
    assert summary["timing_s/moe_observe"] == 0.5
