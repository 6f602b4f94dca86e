"""Trainers of the tiny model of `runs.save_tiny_model`, and sequences for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.rl.config import TrainConfig
from trimtab.rl.sequences import Sequence
from trimtab.rl.trainer import Trainer

LAYERS, EXPERTS, TOP_K = 2, 8, 2


def start(folder: Path, **settings: Any) -> Trainer:
    """A trainer of the tiny model without warm start. Plans move homes, whatever that saves. They have no
    replicas, whose planning needs compiled kernels."""
    torch.set_num_threads(1)
    given: dict[str, Any] = {
        "problems": 6, "samples": 4, "token_budget": 64, "max_new_tokens": 6, "warm_start_steps": 0, "held_out": 10,
        "slots": 0, "seed": 5,
    }  # fmt: skip
    trainer = Trainer(TrainConfig(out=folder / "out", model=folder / "model", **given | settings))
    trainer.session.settings.least_gain = -1e9
    trainer.warm_start()
    return trainer


def make_sequences(count: int, *, hot: bool = False) -> list[Sequence]:
    """The same on all ranks. Lengths of prompts and responses differ.

    Args:
        hot: most tokens use the experts 0 and 1.
    """
    rng = np.random.default_rng(3)
    sequences = []
    for _ in range(count):
        prompt, response = int(rng.integers(2, 8)), int(rng.integers(1, 9))
        fed = prompt + response - 1
        scores = rng.gumbel(size=(fed, LAYERS, EXPERTS)) + 6 * hot * (np.arange(EXPERTS) < TOP_K)
        sequences.append(
            Sequence(
                token_ids=rng.integers(1, 15, prompt + response),
                prompt_length=prompt,
                expert_ids=np.argsort(-scores)[..., :TOP_K].astype(np.uint8),
                reward=0.0,
                advantage=float(rng.normal()) + 0.5,
                log_probs=np.zeros(response, np.float32),
            )
        )
    return sequences
