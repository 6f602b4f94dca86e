"""A whole training run on every rank: warm start, RL steps, evaluation, comparison, summary."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from rich.table import Column, Table

from trimtab.errors import InputError
from trimtab.files import write_atomically, write_problem
from trimtab.report.html import write_html
from trimtab.report.timelines import write_perfetto
from trimtab.rl.checkpoint import Checkpoint, last_checkpoint, remove_unfinished
from trimtab.rl.comparison_text import answer, check, comparison_figures, comparison_table, possible
from trimtab.rl.config import TrainConfig
from trimtab.rl.paired_comparison import PairedComparison, compare_policies
from trimtab.rl.report import report_of
from trimtab.rl.run_log import RunLog, kept_metrics
from trimtab.rl.trainer import Trainer


def run_training(config: TrainConfig) -> None:
    """Train from the last checkpoint in `config.out`, or from the start. All files are written there. Collective.

    Raises:
        InputError: if another run writes there, a file of the stopped run is damaged, or a file can't be written.
    """
    with _input_errors(config.out), _lock(config.out):
        checkpoint = _agreed_checkpoint(config.out)
        trainer = Trainer(config, checkpoint)
        log = _start_log(trainer)
        if checkpoint:
            log.console.print(f"continuing after {checkpoint.step} of {config.steps} steps")
        else:
            with log.progress("warm start", config.warm_start_steps) as advance:
                trainer.warm_start(lambda loss: advance(f"loss {loss:.3f}"))
            trainer.measure_accuracy("after warm start")
            if config.warm_start_steps:
                trainer.save(0)
        log.console.print(f"held-out accuracy after warm start: {trainer.held_out_accuracy['after warm start']:.1%}")
        log.header()
        for step in range(trainer.first_step, config.steps):
            log.step(trainer.step(step))
            if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
                trainer.save(step + 1)
        trainer.measure_accuracy(f"after {config.steps} {trainer.algorithm.title} steps")
        _summarise(trainer, log, _compare(trainer, log))
        log.close()


def _start_log(trainer: Trainer) -> RunLog:
    """The run's log. Rank 0 writes the settings and removes what a stopped run left."""
    config, is_writer = trainer.config, trainer.rank == 0
    if is_writer:
        write_atomically(config.out / "settings.json", config.to_json(trainer.num_ranks))
        remove_unfinished(config.out)
    return RunLog(config.out, first_step=trainer.first_step, is_writer=is_writer)


def _compare(trainer: Trainer, log: RunLog) -> PairedComparison | None:
    """Train on, beside a static trainer that starts from the last checkpoint. The run is saved before. Collective."""
    config = trainer.config
    if not config.compare_pairs or config.mode not in ("plan", "rehome"):
        return None
    static = Trainer(replace(config, mode="static"), _agreed_checkpoint(config.out))
    try:
        with log.progress(f"static against {config.mode}", config.compare_pairs) as advance:
            return compare_policies(static, trainer, config.steps, config.compare_pairs, advance)
    finally:
        static.close()


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


def _summarise(trainer: Trainer, log: RunLog, comparison: PairedComparison | None) -> None:
    """Print accuracies and the comparison; rank 0 writes summary, report and timeline."""
    config, accuracies = trainer.config, trainer.held_out_accuracy
    table = Table("model", Column("accuracy", justify="right"))
    for name, accuracy in accuracies.items():
        table.add_row(name, f"{accuracy:.1%}")
    log.console.print(f"\nHeld-out accuracy, {config.held_out} problems, greedy", table, sep="\n")
    summary: dict[str, object] = {"held_out_accuracy": accuracies}
    files = ["metrics.jsonl", "routing/", "checkpoints/", "tensorboard/"]
    if comparison is not None:
        log.console.print(
            comparison_table(comparison), answer(comparison), possible(comparison), check(comparison), sep="\n"
        )
        summary["comparison"] = comparison_figures(comparison)
        files = ["report.html", "timeline.json.gz", *files]
    if trainer.rank == 0:
        if comparison is not None:
            steps = [json.loads(line) for line in kept_metrics(config.out, config.steps)]
            report = report_of(trainer, comparison, steps)
            write_html(report, config.out / "report.html")
            write_perfetto(report.timelines, config.out / "timeline.json.gz")
        write_atomically(config.out / "summary.json", json.dumps(summary, indent=2) + "\n")
        log.console.print(f"Everything is in {config.out}: {', '.join(files)}")
