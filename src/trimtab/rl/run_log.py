"""What a run leaves behind and shows: metrics.jsonl, TensorBoard events, progress lines. Rank 0 only."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.utils.tensorboard.writer import SummaryWriter

from trimtab.files import write_atomically

COLUMNS = {
    "step": lambda m: f"{m['step']:>4}",
    "reward": lambda m: f"{m['reward']:>6.3f}",
    "max_vio": lambda m: f"{m['moe/max_vio_before']:.3f} -> {m['moe/max_vio_after']:.3f}",
    "replicas": lambda m: f"{m['moe/replicas']:>8}",
    "plan": lambda m: f"{m['plan_s'] * 1e3:>5.1f} ms",
    "rollout": lambda m: f"{m['rollout_s']:>5.2f} s",
    "recompute": lambda m: f"{m['recompute_s']:>7.2f} s",
    "update": lambda m: f"{m['update_s']:>5.2f} s",
}


class RunLog:
    """Metrics and progress of a run. On ranks other than 0 it does nothing.

    Args:
        first_step: what is there of this step and later ones, from a run that was stopped, is removed.
    """

    def __init__(self, out: Path, *, first_step: int, is_writer: bool) -> None:
        self.console = Console(quiet=not is_writer, highlight=False)
        self._file = self._events = None
        if is_writer:
            cut_back(out, first_step)
            self._file = (out / "metrics.jsonl").open("a")
            self._events = SummaryWriter(str(out / "tensorboard"), purge_step=first_step)

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar over `total` steps; call what it yields after each, with a few words on how it goes."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[note]}"), disable=self._file is None) as progress:
            task = progress.add_task(title, total=total, note="")
            yield lambda note: progress.update(task, advance=1, note=note)

    def header(self) -> None:
        widths = (len(show(_SAMPLE)) for show in COLUMNS.values())
        self.console.print("  ".join(name.rjust(width) for name, width in zip(COLUMNS, widths, strict=True)))

    def step(self, metrics: dict[str, Any]) -> None:
        """Write one step's metrics everywhere."""
        self.record(metrics)
        self.console.print("  ".join(show(metrics) for show in COLUMNS.values()))

    def record(self, metrics: dict[str, Any]) -> None:
        """Write metrics to the files only."""
        if self._file is None or self._events is None:
            return
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        for name, value in metrics.items():
            if name != "step" and isinstance(value, int | float):
                self._events.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        if self._file is not None and self._events is not None:
            self._file.close()
            self._events.close()


def cut_back(out: Path, step: int) -> None:
    """Leave metrics and routing of the steps before `step` only, and nothing that is written at the end."""
    for name in ("summary.json", "report.html", "timeline.json.gz"):
        (out / name).unlink(missing_ok=True)
    for path in (out / "routing").glob("*"):
        match = re.fullmatch(r"\.?step-(\d+)\.parquet(\..*)?", path.name)
        if match and int(match[1]) >= step:
            path.unlink()
    metrics = out / "metrics.jsonl"
    if metrics.exists():
        # A run may have been stopped in the middle of its last line.
        lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
        write_atomically(metrics, "".join(line for line in lines if json.loads(line)["step"] < step))


_SAMPLE = {
    "step": 0,
    "reward": 0.0,
    "moe/max_vio_before": 0.0,
    "moe/max_vio_after": 0.0,
    "moe/replicas": 0,
    "plan_s": 0.0,
    "rollout_s": 0.0,
    "recompute_s": 0.0,
    "update_s": 0.0,
}
