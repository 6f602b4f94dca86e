"""Trainers of the tiny model of the fixture `folder`, and sequences for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from helpers.equality import relative_error
from helpers.live_runs import quotas_of_few
from trimtab.array_type import Array
from trimtab.rl.checkpoint import last_checkpoint
from trimtab.rl.config import TrainConfig, ValueModelName
from trimtab.rl.demo_model import load_model
from trimtab.rl.ppo import GAE_LAMBDA
from trimtab.rl.prepared_step import PreparedStep
from trimtab.rl.sequences import Sequence
from trimtab.rl.trainer import Trainer
from trimtab.rl.value_head import ValueHead
from trimtab.rl.value_trunk import ValueTrunk
from trimtab.runtime.live import balancer
from trimtab.runtime.session_settings import Mode

# The policy has changed since the recompute by so much in each token.
LOG_RATIO = 0.1
PlainValues = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Values `[t]` of the states after the fed tokens `[t]` of a sequence, with hidden states `[t, H]`."""
PlainLoss = Callable[[Any, PlainValues, list[Sequence]], torch.Tensor]
"""The loss of a whole model that routes by itself, and of a value model."""

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
    trainer.session.settings = replace(trainer.session.settings, least_gain=-1e9)
    trainer.warm_start()
    return trainer


def start_for_gradients(folder: Path, algorithm: str, mode: Mode, value_model: ValueModelName) -> tuple[Trainer, Any]:
    """A trainer for `compare_gradients`, and its model whole."""
    is_trunk = value_model == "trunk"
    settings = {"slots": 2 * is_trunk, "gradient_checkpointing": is_trunk and mode == "plan"}
    trainer = start(folder, algorithm=algorithm, mini_batches=1, mode=mode, value_model=value_model, **settings)
    return trainer, load_model(folder / "model", trainer.model_config, torch.float32)


def plan_and_recompute(
    trainer: Trainer, sequences: list[Sequence], step: int = 0
) -> tuple[PreparedStep, list[torch.Tensor]]:
    """Plan a step of this rank's sequences and recompute it."""
    prepared = trainer.prepare(sequences, step)
    if prepared.planned is not None:
        trainer.session.apply_plan(prepared.planned, prepared.trace)
    return prepared, trainer.recompute(prepared)


def strengthen_experts(trainer: Trainer) -> None:
    """Make log-probabilities of the model depend on its experts."""
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.mul_({"down_proj": 6, "lm_head": 4}.get(name.rsplit(".", 2)[-1].removesuffix(".weight"), 1))


def make_sequences(count: int, *, hot: bool = False) -> list[Sequence]:
    """The same on all ranks. Lengths of prompts and responses differ. If `hot`, most tokens use experts 0 and 1."""
    rng = np.random.default_rng(3)
    sequences = []
    for _ in range(count):
        prompt, response = int(rng.integers(2, 8)), int(rng.integers(1, 9))
        fed = prompt + response - 1
        scores = rng.gumbel(size=(fed, LAYERS, EXPERTS)) + 6 * hot * (np.arange(EXPERTS) < TOP_K)
        expert_ids = np.argsort(-scores)[..., :TOP_K].astype(np.uint8)
        tokens, advantage = rng.integers(1, 15, prompt + response), float(rng.normal()) + 0.5
        sequences.append(Sequence(tokens, prompt, expert_ids, 0.0, advantage, np.zeros(response, np.float32)))
    return sequences


def randomize(network: nn.Module) -> None:
    """Values that differ between tokens."""
    generator = torch.Generator().manual_seed(2)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


def plain_response(model: Any, value_model: PlainValues, sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a response's tokens by a whole model, and values of the states before them."""
    tokens = torch.from_numpy(sequence.token_ids)
    first, targets = sequence.prompt_length - 1, tokens[sequence.prompt_length :]
    hidden = model.model(tokens[None, :-1]).last_hidden_state[0]
    log_probs = model.lm_head(hidden[first:]).log_softmax(-1)[range(len(targets)), targets]
    return log_probs, value_model(tokens[:-1], hidden)[first:]


def discounted(deltas: Array) -> float:
    """The sum of lambda^t * delta_t."""
    return float(GAE_LAMBDA ** np.arange(len(deltas)) @ deltas)


def compare_gradients(trainer: Trainer, model: Any, sequences: list[Sequence], plain: PlainLoss) -> None:
    """Assert that gradients of an update on all ranks' sequences are those of the whole model in a plain process."""
    value_model = trainer.algorithm.value_model
    assert isinstance(value_model, ValueHead | ValueTrunk)
    homes = dict.fromkeys(dict(trainer.model.named_parameters()), trainer.session.homes)
    if isinstance(value_model, ValueHead):
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
        prepared, log_probs = plan_and_recompute(trainer, sequences[trainer.rank :: trainer.num_ranks])
        old_log_probs = [values - LOG_RATIO for values in log_probs]
        value_model.metrics()
        trainer.accumulate(prepared, old_log_probs, 0)
    if isinstance(value_model, ValueTrunk) and trainer.config.mode == "plan":
        assert value_model.metrics()["value/replicas"] > 0
    plain(model, values, sequences).backward()
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


def assert_equal_states(state: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """Assert that names and values are equal."""
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert torch.equal(value, other[name]), name


def save_and_resume(trainer: Trainer, step: int) -> Trainer:
    """Write a checkpoint after so many steps. Returns a trainer that continues from it. Collective."""
    trainer.save(step)
    dist.barrier()
    checkpoint = last_checkpoint(trainer.config.out)
    assert checkpoint is not None
    checkpoint.check_files()
    return Trainer(trainer.config, checkpoint)
