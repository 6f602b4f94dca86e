"""A whole training run, as every rank executes it: warm start, RL steps, evaluation, comparison, summary."""

from __future__ import annotations

import json
import statistics

from rich.table import Column, Table

from trimtab.rl.comparison import PolicyResult, compare_policies
from trimtab.rl.config import TrainConfig
from trimtab.rl.trainer import Trainer


def run_training(config: TrainConfig) -> None:
    """Train, and leave everything under `config.out`."""
    trainer = Trainer(config)
    trainer.warm_start()
    accuracies = {"after warm start": trainer.held_out_accuracy()}
    trainer.log.console.print(f"held-out accuracy after warm start: {accuracies['after warm start']:.1%}")
    trainer.log.header()
    for step in range(config.steps):
        trainer.log.step(trainer.step(step))
        if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
            trainer.save(step + 1)
    accuracies[f"after {config.steps} GRPO steps"] = trainer.held_out_accuracy()
    results = compare_policies(trainer, config.steps, config.compare_pairs) if config.compare_pairs else {}
    _summarise(trainer, accuracies, results)
    trainer.log.close()


def _summarise(trainer: Trainer, accuracies: dict[str, float], results: dict[str, PolicyResult]) -> None:
    log, config = trainer.log, trainer.config
    accuracy_table = Table("model", Column("accuracy", justify="right"))
    for name, accuracy in accuracies.items():
        accuracy_table.add_row(name, f"{accuracy:.1%}")
    log.console.print(f"\nHeld-out accuracy, {config.held_out} problems, greedy", accuracy_table, sep="\n")
    summary: dict[str, object] = {"held_out_accuracy": accuracies}
    if results:
        static, trimtab = results["static"], results["trimtab"]
        ratio = statistics.median(s / t for s, t in zip(static.step_s, trimtab.step_s, strict=True))
        columns = (Column(name, justify="right") for name in ("step time", "speed-up", "max_vio"))
        policy_table = Table("policy", *columns)
        policy_table.add_row("static", f"{static.median_s:.3f} s", "1.00x", f"{static.max_vio:.3f}")
        policy_table.add_row("trimtab", f"{trimtab.median_s:.3f} s", f"{ratio:.2f}x", f"{trimtab.max_vio:.3f}")
        title = f"Recompute and update of one step, medians of {len(static.step_s)} alternating pairs"
        log.console.print(title, policy_table, sep="\n")
        summary["policies"] = {
            name: {"median_s": result.median_s, "step_s": result.step_s, "max_vio": result.max_vio}
            for name, result in results.items()
        } | {"speedup": ratio}
    if trainer.rank == 0:
        (config.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        log.console.print(f"Everything is in {config.out}: metrics.jsonl, routing/, checkpoints/, tensorboard/")
