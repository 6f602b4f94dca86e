"""Where figures go: a sink is called with a step's figures, on the observer's thread.

What a sink raises is logged once and ends only that sink.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trimtab.files import atomic_file

Sink = Callable[[Mapping[str, float], int], None]


class JsonLines:
    """Appends a line a step to a file: `{"step": 3, "moe/idle_share": 0.31, ...}`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, figures: Mapping[str, float], step: int) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")


class PrometheusText:
    """Writes the last step's figures as a Prometheus text file, for node_exporter's textfile collector.

    A figure `moe/idle_share` becomes the gauge `trimtab_moe_idle_share`. Writes are atomic.

    Args:
        path: ends in `.prom`.
        labels: of every gauge, such as `{"run": "grpo-7"}`.
    """

    def __init__(self, path: str | os.PathLike[str], labels: Mapping[str, str] | None = None) -> None:
        self._path = Path(path)
        pairs = [f'{name}="{_escaped(value)}"' for name, value in (labels or {}).items()]
        self._labels = "{" + ",".join(pairs) + "}" if pairs else ""

    def __call__(self, figures: Mapping[str, float], step: int) -> None:
        lines = []
        for name, value in {"step": step, **figures}.items():
            gauge = "trimtab_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            lines += [f"# TYPE {gauge} gauge", f"{gauge}{self._labels} {value!r}"]
        with atomic_file(self._path) as file:
            file.write(("\n".join(lines) + "\n").encode())


class TensorBoard:
    """Adds scalars to a TensorBoard run in a folder.

    Raises:
        ImportError: without `tensorboard` or torch.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(os.fspath(folder))

    def __call__(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class WandB:
    """Logs to a Weights & Biases run, by default the one that is active now.

    Figures have the step axis `moe/step`, since they arrive after the framework has logged their step, and W&B drops
    values of steps that are over.

    Raises:
        ImportError: without `wandb`.
        ValueError: if no run is active.
    """

    def __init__(self, run: Any = None) -> None:
        import wandb

        self._run: Any = run or wandb.run
        if self._run is None:
            raise ValueError("no run of Weights & Biases is active; call wandb.init first, or give the run")
        self._known: set[str] = set()

    def __call__(self, figures: Mapping[str, float], step: int) -> None:
        for name in figures.keys() - self._known:
            self._run.define_metric(name, step_metric="moe/step")
        self._known |= figures.keys()
        self._run.log({"moe/step": step, **figures})


class MLflow:
    """Logs to an MLflow run, by default the one that is active now.

    The run's id is kept: MLflow's active run belongs to a thread, and another thread would begin a run of its own.

    Raises:
        ImportError: without `mlflow`.
        ValueError: if no run is active.
    """

    def __init__(self, run_id: str | None = None) -> None:
        import mlflow

        run = mlflow.active_run()
        if run_id is None and run is None:
            raise ValueError("no run of MLflow is active; call mlflow.start_run first, or give its run_id")
        self._run_id = run_id or run.info.run_id
        self._client = mlflow.MlflowClient()

    def __call__(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._client.log_metric(self._run_id, name, value, step=step)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
