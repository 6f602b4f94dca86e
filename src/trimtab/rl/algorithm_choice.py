"""`make_algorithm`: the algorithm of a run by its name."""

from __future__ import annotations

import torch
import torch.distributed as dist

from trimtab.rl.algorithm import Algorithm
from trimtab.rl.config import TrainConfig
from trimtab.rl.grpo import GRPO
from trimtab.rl.ppo import PPO
from trimtab.rl.task import TASKS
from trimtab.rl.tppo import TPPO
from trimtab.rl.value_model import ValueModel
from trimtab.rl.windows import Windows


def make_algorithm(config: TrainConfig, hidden_size: int, device: torch.device) -> Algorithm:
    """The algorithm of a run.

    Args:
        config: of the run; `algorithm` is one of `config.ALGORITHMS`.
        hidden_size: of the model.
        device: of the model.
    """
    if config.algorithm == "grpo":
        return GRPO()
    value_model = ValueModel(hidden_size, config.seed, device)
    if config.algorithm == "ppo":
        return PPO(value_model)
    places = len(range(dist.get_rank(), config.problems, dist.get_world_size())) * config.samples
    windows = Windows(
        places,
        window=config.window,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        operation=TASKS[config.task],
    )
    return TPPO(value_model, windows)
