"""Checkpoints of a run: the Hugging Face layout, and in `trainer.pt` what a resumed run needs beside the weights."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipes.rl.task import save_model
from trimtab.errors import InputError


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        folder: of the checkpoint; vanilla transformers loads it.
        step: RL steps done.
        held_out_accuracy: measured so far, by the time of measurement.
        optimizer: state by parameter name, with the experts of all ranks.
        algorithm: state of the value model and of open responses.
    """

    folder: Path
    step: int
    held_out_accuracy: dict[str, float]
    optimizer: dict[str, Any]
    algorithm: dict[str, Any]


def last_folder(out: Path) -> Path | None:
    """The folder of the last checkpoint of a run, if there is one. Checkpoints with a name are complete."""
    return max(out.glob("checkpoints/step-*"), key=step_of, default=None)


def step_of(folder: Path) -> int:
    """RL steps done at the time of a checkpoint."""
    return int(folder.name.removeprefix("step-"))


def last_checkpoint(out: Path) -> Checkpoint | None:
    """The last checkpoint of a run, if there is one.

    Raises:
        InputError: if it is damaged.
    """
    folder = last_folder(out)
    if folder is None:
        return None
    try:
        state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
        # Experts of earlier versions had homes; their state was in the same order.
        state.pop("homes", None)
        return Checkpoint(folder, step_of(folder), **state)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: no checkpoint of this version ({str(error).splitlines()[0]})") from None


def write_checkpoint(checkpoint: Checkpoint, config: Any, tokenizer: Any, weights: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint to its folder, which appears when it is complete. On one rank.

    Args:
        config, tokenizer: of the model.
        weights: of the whole model.
    """
    folder = checkpoint.folder
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    state = {name: getattr(checkpoint, name) for name in ("held_out_accuracy", "optimizer", "algorithm")}
    save_model(config, weights, tokenizer, partial)
    torch.save(state, partial / "trainer.pt")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
