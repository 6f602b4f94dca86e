"""`make_algorithm`: the algorithm of a run by its name."""

from __future__ import annotations

import torch

from trimtab.rl.algorithm import Algorithm
from trimtab.rl.config import TrainConfig
from trimtab.rl.grpo import GRPO
from trimtab.rl.ppo import PPO
from trimtab.rl.value_model import ValueModel


def make_algorithm(config: TrainConfig, hidden_size: int, device: torch.device) -> Algorithm:
    """The algorithm of a run.

    Args:
        config: of the run; `algorithm` is one of `config.ALGORITHMS`.
        hidden_size: of the model.
        device: of the model.
    """
    if config.algorithm == "grpo":
        return GRPO()
    return PPO(ValueModel(hidden_size, config.seed, device))
