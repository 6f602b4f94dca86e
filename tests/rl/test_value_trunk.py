"""A value model with experts of its own on two ranks, balanced from live routing while the policy is planned."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import torch

from helpers.examples import nightly_except
from helpers.rank_pool import on_ranks
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from helpers.trainers import assert_equal_states, make_sequences, plan_and_recompute, randomize, start
from trimtab.rl.batches import collate
from trimtab.rl.config import ValueModelName
from trimtab.rl.sequences import Sequence
from trimtab.rl.step_metrics import StepClock
from trimtab.rl.trainer import Trainer
from trimtab.rl.value_head import ValueHead
from trimtab.rl.value_model import MAX_NORM
from trimtab.rl.value_trunk import ValueTrunk
from trimtab.runtime.session_settings import Mode


def start_trunk(folder: Path, **settings: Any) -> tuple[Trainer, ValueTrunk]:
    trainer = start(folder, value_model="trunk", **settings)
    trunk = trainer.algorithm.value_model
    assert isinstance(trunk, ValueTrunk)
    return trainer, trunk


def some_finished(count: int = 14) -> list[Sequence]:
    rng = np.random.default_rng(4)
    return [
        replace(sequence, is_finished=index % 3 == 0, reward=float(rng.random()))
        for index, sequence in enumerate(make_sequences(count))
    ]


def count_sequences(trunk: ValueTrunk) -> list[int]:
    """Those that it is fed from now on, a number for each forward."""
    fed: list[int] = []
    trunk.network["trunk"].register_forward_pre_hook(
        lambda _module, _args, given: fed.append(len(given["input_ids"])), with_kwargs=True
    )
    return fed


@runs_on_ranks()
def test_it_begins_with_the_policy_and_values_of_0(folder: Path) -> None:
    trainer, trunk = start_trunk(folder, algorithm="ppo")
    policy = trainer.session.logical_state_dict(trainer.model)
    weights = trunk.session.logical_state_dict(trunk.network)
    assert len(weights) == len(policy) - 1 + 2  # without the output embeddings, with weight and bias of the head
    for name, value in weights.items():
        expected = policy[f"model.{name.removeprefix('trunk.')}"] if name.startswith("trunk.") else torch.zeros(())
        assert torch.equal(value, expected.expand_as(value)), name
    batch = collate(make_sequences(3), pad_token_id=0, device=torch.device("cpu"))
    assert not trunk.values(batch, torch.empty(0), batch.response_mask).any()
    trainer.close()


@runs_on_ranks()
def test_only_sequences_whose_value_is_wanted_are_fed(folder: Path) -> None:
    trainer, trunk = start_trunk(folder, algorithm="t-ppo")
    randomize(trunk.network["head"])
    fed = count_sequences(trunk)
    sequences = some_finished()[trainer.rank :]
    batch = collate(sequences, pad_token_id=0, device=torch.device("cpu"))
    nothing = torch.empty(0)
    whole = trunk.values(batch, nothing, torch.ones_like(batch.response_mask))
    some = trunk.values(batch, nothing, batch.response_mask * batch.finished[:, None])
    # One rank needs no value; the other one needs all.
    last = trunk.values(batch, nothing, batch.response_mask * trainer.rank)
    for index, sequence in enumerate(sequences):
        own = slice(sequence.num_fed)
        assert torch.allclose(some[index, own], whole[index, own] * sequence.is_finished, atol=1e-6)
        assert torch.allclose(last[index, own], whole[index, own] * trainer.rank, atol=1e-6)
    finished = sum(sequence.is_finished for sequence in sequences)
    assert fed == [len(sequences), finished, len(sequences) if trainer.rank else 1]
    trainer.close()


@runs_on_ranks()
def test_the_update_feeds_it_finished_responses(folder: Path) -> None:
    trainer, trunk = start_trunk(folder, algorithm="t-ppo", mode="off")
    fed = count_sequences(trunk)
    prepared, old_log_probs = plan_and_recompute(trainer, some_finished()[trainer.rank :: 2])
    assert fed == [len(batch.input_ids) for batch in prepared.batches]
    fed.clear()
    trainer.update(prepared, old_log_probs, 0)
    assert fed == [max(1, int(batch.finished.sum())) for batch in prepared.batches]
    assert sum(fed) < sum(len(batch.input_ids) for batch in prepared.batches)
    trainer.close()


@pytest.mark.parametrize("value_model", get_args(ValueModelName))
@runs_on_ranks()
def test_gradients_are_clipped_by_the_norm_of_all_ranks(folder: Path, value_model: ValueModelName) -> None:
    trainer = start(folder, algorithm="ppo", value_model=value_model)
    model = trainer.algorithm.value_model
    assert isinstance(model, ValueHead | ValueTrunk)
    total = sum(each.numel() * (2 if "experts" in name else 1) for name, each in model.network.named_parameters())
    for size in (0.1, 50.0):
        scale = size * MAX_NORM / total**0.5
        for parameter in model.network.parameters():
            parameter.grad = torch.full_like(parameter, scale)
        with mock.patch.object(model.optimizer, "step"), mock.patch.object(model.optimizer, "zero_grad"):
            model.step()
        for parameter in model.network.parameters():
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, torch.tensor(scale / max(size, 1.0)), rtol=1e-4)
    trainer.close()


def train_some_steps(folder: Path, mode: Mode, algorithm: str, value_model: ValueModelName) -> list[dict[str, float]]:
    settings = {"slots": 2, "token_budget": 512} if value_model == "trunk" else {}
    trainer = start(folder, algorithm=algorithm, mode=mode, value_model=value_model, learning_rate=1e-3, **settings)
    found = []
    for step in range(3):
        # With a trunk, enough rows that a replica has work.
        sequences = some_finished(160 if value_model == "trunk" else 14)
        _, metrics = trainer.train(sequences[trainer.rank :: 2], step, StepClock())
        assert (metrics["moe/unplanned_micro_steps"] > 0) == (mode == "off")
        assert value_model == "head" or (metrics["value/replicas"] > 0) == (mode == "plan")
        names = ("loss", "grad_norm", "ppo/", "value/loss", "value/mean")
        found.append({name: metrics[name] for name in metrics if name.startswith(names)})
    trainer.close()
    return found


@pytest.mark.parametrize(
    ("algorithm", "value_model"),
    nightly_except(product(["ppo", "t-ppo"], get_args(ValueModelName)), ("ppo", "head"), ("t-ppo", "trunk")),
)
def test_balanced_and_unbalanced_runs_have_the_same_losses(
    folder: Path, algorithm: str, value_model: ValueModelName
) -> None:
    planned, off = (
        on_ranks(train_some_steps, (folder, mode, algorithm, value_model), ranks=2)[0] for mode in ("plan", "off")
    )
    for of_plan, of_off in zip(planned, off, strict=True):
        assert of_plan == pytest.approx(of_off, rel=1e-4, abs=1e-6)
    assert planned[-1]["value/loss"] < planned[0]["value/loss"]


def train_one(folder: Path, value_model: str) -> dict[str, float]:
    """A step with fewer sequences than mini-batches."""
    trainer = start(folder, algorithm="ppo", value_model=value_model, mini_batches=4)
    # No response may have a token to train on yet.
    assert trainer.train([], 0, StepClock())[1]["loss"] == 0
    prepared, metrics = trainer.train(some_finished()[:1] if trainer.rank == 0 else [], 1, StepClock())
    assert prepared.schedule.num_micro_steps == 1
    trainer.close()
    return {name: metrics[name] for name in ("loss", "value/loss")}


def test_mini_batches_may_be_empty(folder: Path) -> None:
    head, trunk = (on_ranks(train_one, (folder, value_model), ranks=2)[0] for value_model in get_args(ValueModelName))
    # First values are 0.
    assert head == pytest.approx(trunk)
    assert head["value/loss"] > 0


@runs_on_ranks()
def test_its_state_has_all_experts_in_logical_order(folder: Path) -> None:
    trainer, trunk = start_trunk(folder, algorithm="ppo", learning_rate=1e-3)
    trainer.train(some_finished()[trainer.rank :: 2], 0, StepClock())
    before, _ = of_all_ranks({name: value.clone() for name, value in trunk.state().items()})
    # Other weights and moments.
    trainer.train(some_finished()[trainer.rank :: 2], 1, StepClock())
    names = {*trunk.network.state_dict()}
    assert {name.removeprefix("parameter/") for name in before if name.startswith("parameter/")} == names
    assert {f"exp_avg/{name}" for name in names} <= before.keys()
    assert len(before["exp_avg/trunk.layers.0.mlp.experts.down_proj"]) == 8
    # Names of others are left alone.
    trunk.load_state(before | {"windows/length": torch.zeros(1)})
    assert_equal_states(before, of_all_ranks(trunk.state())[0])
    trainer.close()
