"""A whole training run on every rank: warm start, RL steps, evaluation, comparison, summary."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from rich.table import Column, Table

from trimtab.errors import InputError
from trimtab.files import write_atomically, write_problem
from trimtab.report.html import write_html
from trimtab.report.perfetto import write_perfetto
from trimtab.rl.checkpoint import Checkpoint, last_checkpoint
from trimtab.rl.config import TrainConfig
from trimtab.rl.paired_comparison import MeasuredPolicy, compare_policies, speedup
from trimtab.rl.report import report_of
from trimtab.rl.run_log import kept_metrics
from trimtab.rl.trainer import Trainer


def run_training(config: TrainConfig) -> None:
    """Train from the last checkpoint in `config.out`, or from the start. All files are written there. Collective.

    Raises:
        InputError: if another run writes there, a file of the stopped run is damaged, or a file can't be written.
    """
    with _input_errors(config.out), _lock(config.out):
        checkpoint = _agreed_checkpoint(config.out)
        trainer = Trainer(config, checkpoint)
        if checkpoint:
            trainer.log.console.print(f"continuing after {checkpoint.step} of {config.steps} steps")
        else:
            trainer.warm_start()
            trainer.measure_accuracy("after warm start")
            if config.warm_start_steps:
                trainer.save(0)
        accuracy = trainer.held_out_accuracy["after warm start"]
        trainer.log.console.print(f"held-out accuracy after warm start: {accuracy:.1%}")
        trainer.log.header()
        for step in range(trainer.first_step, config.steps):
            trainer.log.step(trainer.step(step))
            if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
                trainer.save(step + 1)
        trainer.measure_accuracy(f"after {config.steps} GRPO steps")
        results = compare_policies(trainer, config.steps, config.compare_pairs) if config.compare_pairs else {}
        _summarise(trainer, results)
        trainer.log.close()


@contextmanager
def _input_errors(out: Path) -> Iterator[None]:
    """Raise InputError if a file can't be written."""
    try:
        yield
    except OSError as error:
        if (problem := write_problem(error, out)) is None:
            raise
        raise InputError(f"{problem}; when that is solved, continue with --resume") from None


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Prevent two runs from writing to one folder. The lock is released when the process ends, for any reason."""
    if dist.get_rank() != 0:
        yield
        return
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"--output {out}: another run is writing there; wait until it ends, or stop it") from None
        yield
    finally:
        os.close(folder)


def _agreed_checkpoint(out: Path) -> Checkpoint | None:
    """The last checkpoint that rank 0 finds, on every rank. Its files and the metrics before it are undamaged."""
    found = [last_checkpoint(out) if dist.get_rank() == 0 else None]
    if found[0] is not None:
        found[0].check_files()
        kept_metrics(out, found[0].step)
    dist.broadcast_object_list(found)
    return found[0]


def _summarise(trainer: Trainer, results: dict[str, MeasuredPolicy]) -> None:
    """Print accuracies and the comparison; rank 0 writes summary, report and timeline."""
    log, config, accuracies = trainer.log, trainer.config, trainer.held_out_accuracy
    accuracy_table = Table("model", Column("accuracy", justify="right"))
    for name, accuracy in accuracies.items():
        accuracy_table.add_row(name, f"{accuracy:.1%}")
    log.console.print(f"\nHeld-out accuracy, {config.held_out} problems, greedy", accuracy_table, sep="\n")
    summary: dict[str, object] = {"held_out_accuracy": accuracies}
    if results:
        static = results["static"]
        columns = (Column(name, justify="right") for name in ("step time", "speed-up", "max_vio"))
        policy_table = Table("policy", *columns)
        for name, result in results.items():
            ratio = speedup(static, result)
            policy_table.add_row(name, f"{result.median_s:.3f} s", f"{ratio:.2f}x", f"{result.max_vio:.3f}")
        title = f"Recompute and update of one step, medians of {len(static.step_s)} alternating pairs"
        log.console.print(title, policy_table, sep="\n")
        summary["policies"] = {
            name: {"median_s": result.median_s, "step_s": result.step_s, "max_vio": result.max_vio}
            for name, result in results.items()
        } | {"speedup": speedup(static, results["trimtab"])}
    if trainer.rank == 0:
        files = ["metrics.jsonl", "routing/", "checkpoints/", "tensorboard/"]
        if results:
            report = report_of(trainer, results)
            write_html(report, config.out / "report.html")
            write_perfetto(report.timelines, config.out / "timeline.json.gz")
            files = ["report.html", "timeline.json.gz", *files]
        write_atomically(config.out / "summary.json", json.dumps(summary, indent=2) + "\n")
        log.console.print(f"Everything is in {config.out}: {', '.join(files)}")
