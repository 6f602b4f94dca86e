"""Trainers of the tiny model of `runs.save_tiny_model`, and sequences for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from helpers.equality import relative_error
from helpers.live_runs import quotas_of_few
from helpers.runs import save_tiny_model
from trimtab.rl.checkpoint import last_checkpoint
from trimtab.rl.config import TrainConfig
from trimtab.rl.sequences import Sequence
from trimtab.rl.trainer import Trainer
from trimtab.rl.value_head import ValueHead
from trimtab.rl.value_trunk import ValueTrunk
from trimtab.runtime.live import balancer

# The policy has changed since the recompute by so much in each token.
LOG_RATIO = 0.1
PlainValues = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Values `[t]` of the states after the fed tokens `[t]` of a sequence, with hidden states `[t, H]`."""
PlainLoss = Callable[[Any, PlainValues, list[Sequence]], torch.Tensor]
"""The loss of a whole model that routes by itself, and of a value model."""

LAYERS, EXPERTS, TOP_K = 2, 8, 2


def make_folder(folder: Path) -> Path:
    """The folder with the tiny model and a place for a run."""
    save_tiny_model(folder / "model")
    (folder / "out").mkdir()
    return folder


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


def randomize(network: nn.Module) -> None:
    """Values that differ between tokens."""
    generator = torch.Generator().manual_seed(2)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


def compare_gradients(trainer: Trainer, model: Any, sequences: list[Sequence], plain: PlainLoss) -> None:
    """Assert that the gradients of one update with a value model are those of a plain single process.

    Args:
        model: the whole model, with the trainer's weights.
        sequences: of all ranks.
    """
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

    prepared = trainer.prepare(sequences[trainer.rank :: trainer.num_ranks], 0)
    if prepared.planned is not None:
        trainer.session.apply_plan(prepared.planned, prepared.trace)
    with mock.patch.object(balancer, "choose_quotas", quotas_of_few):
        old_log_probs = [log_probs - LOG_RATIO for log_probs in trainer.recompute(prepared)]
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
            whole = whole[layer.experts_of(trainer.rank)]
        assert whole.abs().max() > 0
        assert parameter.grad is not None
        assert relative_error(parameter.grad, whole) < 1e-4, name


def save_and_resume(trainer: Trainer, step: int) -> Trainer:
    """Write a checkpoint after so many steps. Returns a trainer that continues from it. Collective."""
    trainer.save(step)
    dist.barrier()
    checkpoint = last_checkpoint(trainer.config.out)
    assert checkpoint is not None
    checkpoint.check_files()
    return Trainer(trainer.config, checkpoint)
