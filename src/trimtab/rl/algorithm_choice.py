"""`make_algorithm`: the algorithm of a run by its name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trimtab.integrations.transformers import num_experts
from trimtab.rank_variables import rank_variable
from trimtab.rl.algorithm import Algorithm
from trimtab.rl.config import TrainConfig
from trimtab.rl.grpo import GRPO
from trimtab.rl.ppo import PPO
from trimtab.rl.task import TASKS
from trimtab.rl.tppo import TPPO
from trimtab.rl.value_head import ValueHead
from trimtab.rl.value_model import ValueModel
from trimtab.rl.value_trunk import ValueTrunk
from trimtab.rl.windows import Windows
from trimtab.runtime import Session


def make_algorithm(config: TrainConfig, model_config: Any, device: torch.device) -> Algorithm:
    """The algorithm of a run.

    Args:
        config: of the run; `algorithm` is one of `config.ALGORITHMS`.
        model_config: of the model.
        device: of the model.
    """
    if config.algorithm == "grpo":
        return GRPO()
    value_model = _make_value_model(config, model_config, device)
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


def _make_value_model(config: TrainConfig, model_config: Any, device: torch.device) -> ValueModel:
    if config.value_model == "head":
        return ValueHead(model_config.hidden_size, config.seed, device)
    # Runs that are planned can be repeated bit for bit. `quota` depends on counts alone, `auto` on measured times.
    policy = config.policy if config.mode == "live" else "quota" if config.mode == "plan" else "off"
    session = Session(
        num_experts=num_experts(model_config),
        mode="live",
        policy=policy,
        slots_per_rank=config.slots,
        ranks_per_node=rank_variable("LOCAL_WORLD_SIZE", dist.get_world_size()),
    )
    return ValueTrunk(model_config, session, device, gradient_checkpointing=config.gradient_checkpointing)
