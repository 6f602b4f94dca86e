"""Trainers of the tiny model of the fixture `folder`, and responses for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from helpers.equality import relative_error
from helpers.random_choices import quotas_of_few
from recipes.rl.checkpoint import last_checkpoint
from recipes.rl.config import TrainConfig
from recipes.rl.responses import Response
from recipes.rl.t_ppo import GAE_LAMBDA, ValueTrunk
from recipes.rl.task import load_model
from recipes.rl.train import PreparedStep, Trainer
from trimtab.array_type import Array
from trimtab.runtime.live import balancer
from trimtab.runtime.session_settings import Mode

# The policy has changed since the recompute by so much in each token.
LOG_RATIO = 0.1
PlainValues = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Values `[t]` of the states after the fed tokens `[t]` of a response, with hidden states `[t, H]`."""
PlainLoss = Callable[[Any, PlainValues, list[Response]], torch.Tensor]
"""The loss of a whole model that routes by itself, and of a value model."""

LAYERS, EXPERTS, TOP_K = 2, 8, 2


def start(
    folder: Path, kind: type[Trainer] = Trainer, config: type[TrainConfig] = TrainConfig, **settings: Any
) -> Trainer:
    """A trainer of the tiny model without warm start. Plans move homes, whatever that saves. They have no
    replicas, whose planning needs compiled kernels."""
    torch.set_num_threads(1)
    given: dict[str, Any] = {
        "problems": 6, "samples": 4, "token_budget": 64, "max_new_tokens": 6, "warm_start_steps": 0, "held_out": 10,
        "slots": 0, "seed": 5,
    }  # fmt: skip
    trainer = kind(config(out=folder / "out", model=folder / "model", **given | settings))
    trainer.session.settings = replace(trainer.session.settings, least_gain=-1e9)
    trainer.warm_start(range(trainer.config.warm_start_steps))
    return trainer


def start_for_gradients(folder: Path, algorithm: str, mode: Mode, value_model: str) -> tuple[Trainer, Any]:
    """A trainer for `compare_gradients`, and its model whole."""
    is_trunk = value_model == "trunk"
    trainer = start(folder, algorithm=algorithm, mini_batches=1, mode=mode, value_model=value_model, slots=2 * is_trunk)
    return trainer, load_model(folder / "model", trainer.model_config, torch.float32)


def plan_and_recompute(
    trainer: Trainer, responses: list[Response], step: int = 0
) -> tuple[PreparedStep, list[torch.Tensor]]:
    """Plan a step of this rank's responses and recompute it."""
    prepared = trainer.prepare(responses, step)
    if prepared.planned is not None:
        trainer.session.apply_plan(prepared.planned, prepared.trace)
    return prepared, trainer.recompute(prepared)


def strengthen_experts(trainer: Trainer) -> None:
    """Make log-probabilities of the model depend on its experts."""
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.mul_({"down_proj": 6, "lm_head": 4}.get(name.rsplit(".", 2)[-1].removesuffix(".weight"), 1))


def make_responses(count: int, *, hot: bool = False) -> list[Response]:
    """The same on all ranks. Lengths of prompts and responses differ. If `hot`, most tokens use experts 0 and 1."""
    rng = np.random.default_rng(3)
    responses = []
    for _ in range(count):
        prompt, response = int(rng.integers(2, 8)), int(rng.integers(1, 9))
        fed = prompt + response - 1
        scores = rng.gumbel(size=(fed, LAYERS, EXPERTS)) + 6 * hot * (np.arange(EXPERTS) < TOP_K)
        expert_ids = np.argsort(-scores)[..., :TOP_K].astype(np.uint8)
        tokens, advantage = rng.integers(1, 15, prompt + response), float(rng.normal()) + 0.5
        log_probs = np.zeros(response, np.float32)
        responses.append(Response(tokens, prompt, expert_ids, log_probs, advantage=advantage))
    return responses


def randomize(network: nn.Module) -> None:
    """Values that differ between tokens."""
    generator = torch.Generator().manual_seed(2)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


def plain_response(model: Any, value_model: PlainValues, response: Response) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a response's tokens by a whole model, and values of the states before them."""
    tokens = torch.from_numpy(response.token_ids)
    first, targets = response.prompt_length - 1, tokens[response.prompt_length :]
    hidden = model.model(tokens[None, :-1]).last_hidden_state[0]
    log_probs = model.lm_head(hidden[first:]).log_softmax(-1)[range(len(targets)), targets]
    return log_probs, value_model(tokens[:-1], hidden)[first:]


def discounted(deltas: Array) -> float:
    """The sum of lambda^t * delta_t."""
    return float(GAE_LAMBDA ** np.arange(len(deltas)) @ deltas)


def compare_gradients(trainer: Trainer, model: Any, responses: list[Response], plain: PlainLoss) -> None:
    """Assert that gradients of an update on all ranks' responses are those of the whole model in a plain process."""
    value_model = trainer.algorithm.value_model
    assert value_model is not None
    homes = dict.fromkeys(dict(trainer.model.named_parameters()), trainer.session.homes)
    if not isinstance(value_model, ValueTrunk):
        randomize(value_model.network)
        head: nn.Module = copy.deepcopy(value_model.network)
        network: nn.Module = head
    else:
        randomize(value_model.network["head"])
        homes |= dict.fromkeys(dict(value_model.network.named_parameters()), value_model.session.homes)
        trunk, head = copy.deepcopy(model.model), copy.deepcopy(value_model.network["head"])
        network = nn.ModuleDict({"trunk": trunk, "head": head})

    def values(tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = head(hidden.detach() if network is head else trunk(tokens[None]).last_hidden_state[0])
        return found[:, 0]

    with mock.patch.object(balancer, "choose_quotas", quotas_of_few):
        prepared, log_probs = plan_and_recompute(trainer, responses[trainer.rank :: trainer.num_ranks])
        old_log_probs = [values - LOG_RATIO for values in log_probs]
        value_model.metrics()
        trainer.accumulate(prepared, old_log_probs, 0)
    if isinstance(value_model, ValueTrunk) and trainer.config.mode == "plan":
        assert value_model.metrics()["value/replicas"] > 0
    plain(model, values, responses).backward()
    expected = dict(model.named_parameters()) | dict(network.named_parameters())
    found = dict(trainer.model.named_parameters()) | dict(value_model.network.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        whole = expected[name].grad
        if ".experts." in name:
            layer = homes[name][int(name.split(".layers.")[1].split(".")[0])]
            whole = whole[layer.places.experts_RH[trainer.rank]]
        assert whole.abs().max() > 0
        assert parameter.grad is not None
        assert relative_error(parameter.grad, whole) < 1e-4, name


def save_and_resume(trainer: Trainer, step: int) -> Trainer:
    """Write a checkpoint after so many steps. Returns a trainer that continues from it. Collective."""
    trainer.save(step)
    dist.barrier()
    checkpoint = last_checkpoint(trainer.config.out)
    assert checkpoint is not None
    return type(trainer)(trainer.config, checkpoint)
