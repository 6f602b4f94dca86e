"""Metrics of a run: metrics.jsonl, TensorBoard events, progress lines. Written by rank 0 only."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.utils.tensorboard.writer import SummaryWriter

from trimtab.console import console
from trimtab.errors import InputError
from trimtab.files import write_atomically

# Header and format of each column of the step lines.
COLUMNS = {
    "step": "{step:>4}",
    "reward": "{reward:>6.3f}",
    "max_vio": "{moe/max_vio_before:.3f} -> {moe/max_vio_after:.3f}",
    "replicas": "{moe/replicas:>8}",
    "plan": "{plan_ms:>5.1f} ms",
    "rollout": "{rollout_s:>5.2f} s",
    "recompute": "{recompute_s:>7.2f} s",
    "update": "{update_s:>5.2f} s",
}


class RunLog:
    """Writes and prints metrics and progress of a run. On ranks other than 0 it does nothing.

    Args:
        out: folder of the run.
        first_step: files and metrics of this and later steps, from a stopped run, are removed.
        is_writer: whether this rank writes.
    """

    def __init__(self, out: Path, *, first_step: int, is_writer: bool) -> None:
        self.console = console(quiet=not is_writer)
        self._file = self._events = None
        if is_writer:
            remove_later_steps(out, first_step)
            number_event_files(out / "tensorboard")
            self._file = (out / "metrics.jsonl").open("a")
            self._events = SummaryWriter(str(out / "tensorboard"), purge_step=first_step)

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        """A progress bar over `total` steps. Yields a function to call after each step, with a short note."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[note]}"), disable=self._file is None) as progress:
            task = progress.add_task(title, total=total, note="")
            yield lambda note: progress.update(task, advance=1, note=note)

    def header(self) -> None:
        """Print the column headers of the step lines."""
        # A Counter has 0 for every metric.
        widths = (len(text.format_map(Counter())) for text in COLUMNS.values())
        self.console.print("  ".join(name.rjust(width) for name, width in zip(COLUMNS, widths, strict=True)))

    def step(self, metrics: dict[str, Any]) -> None:
        """Write one step's metrics to the files, and print a line."""
        self.record(metrics)
        line = metrics | {"plan_ms": metrics["plan_s"] * 1e3}
        self.console.print("  ".join(text.format_map(line) for text in COLUMNS.values()))

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
        # Another thread writes them; a process that is killed after its next checkpoint has lost none.
        self._events.flush()

    def close(self) -> None:
        """Close the files."""
        if self._file is not None and self._events is not None:
            self._file.close()
            self._events.close()


def remove_later_steps(out: Path, step: int) -> None:
    """Remove metrics and routing of `step` and later steps, and the files that are written at the end of a run."""
    for name in ("summary.json", "report.html", "timeline.json.gz"):
        (out / name).unlink(missing_ok=True)
    for path in (out / "routing").glob("step-*.parquet"):
        match = re.fullmatch(r"step-(\d+)", path.stem)
        if match and int(match[1]) >= step:
            path.unlink()
    if (out / "metrics.jsonl").exists():
        write_atomically(out / "metrics.jsonl", "".join(kept_metrics(out, step)))


def kept_metrics(out: Path, step: int) -> list[str]:
    """Lines of `metrics.jsonl` of steps before `step`; none if there is no such file.

    Raises:
        InputError: if one of them is damaged or missing.
    """
    metrics = out / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
    if not lines:
        return []
    # The first step is not 0 if the file was removed between two runs.
    first = _step_of(lines[0])
    count = 0 if first is None else max(0, step - first)
    for number, expected in enumerate(range(first or 0, step)):
        if number >= len(lines) or _step_of(lines[number]) != expected:
            raise InputError(
                f"{metrics}: line {number + 1} should have the metrics of step {expected}; restore the file, or remove "
                "it to continue without the metrics of earlier steps"
            )
    return [line.decode() for line in lines[:count]]


def _step_of(line: bytes) -> int | None:
    """The step whose metrics a line has; None if it is damaged or incomplete."""
    try:
        step = json.loads(line)["step"]
    except (KeyError, TypeError, ValueError):
        return None
    return step if isinstance(step, int) and line.endswith(b"\n") else None


def number_event_files(folder: Path) -> None:
    """Replace the times in the names of TensorBoard's files by numbers, in the same order.

    TensorBoard reads files in the order of their names, and the next one is named after the clock, which may have been
    set back.
    """
    for number, path in enumerate(sorted(folder.glob("events.out.tfevents.*"))):
        rest = path.name.split(".", 4)[4]
        path.rename(folder / f"events.out.tfevents.{number:010}.{rest}")
