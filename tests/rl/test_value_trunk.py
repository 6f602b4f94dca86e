"""A value model with experts of its own on two ranks, balanced from live routing while the policy is planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.live_runs import quotas_of_few
from helpers.rank_pool import RankPool
from helpers.trainers import make_folder, make_sequences, randomize, save_and_resume, start
from trimtab.rl.batches import collate
from trimtab.rl.config import ValueModelName
from trimtab.rl.sequences import Sequence
from trimtab.rl.step_metrics import StepClock
from trimtab.rl.trainer import Trainer
from trimtab.rl.value_trunk import ValueTrunk
from trimtab.runtime.live import balancer

State = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("trunk"))


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


def check_first_values(state: State, folder: Path) -> None:
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


def test_it_begins_with_the_policy_and_values_of_0(pool: RankPool, folder: Path) -> None:
    pool.call(check_first_values, folder)


def check_wanted(state: State, folder: Path) -> None:
    trainer, trunk = start_trunk(folder, algorithm="t-ppo")
    randomize(trunk.network["head"])
    fed: list[int] = []
    hook = trunk.network["trunk"].register_forward_pre_hook(
        lambda _module, _args, given: fed.append(len(given["input_ids"])), with_kwargs=True
    )
    sequences = some_finished()[trainer.rank :]
    batch = collate(sequences, pad_token_id=0, device=torch.device("cpu"))
    nothing = torch.empty(0)
    whole = trunk.values(batch, nothing, torch.ones_like(batch.response_mask))
    some = trunk.values(batch, nothing, batch.response_mask * batch.finished[:, None])
    # One rank needs no value; the other one needs all.
    last = trunk.values(batch, nothing, batch.response_mask * trainer.rank)
    hook.remove()
    for index, sequence in enumerate(sequences):
        own = slice(sequence.num_fed)
        assert torch.allclose(some[index, own], whole[index, own] * sequence.is_finished, atol=1e-6)
        assert torch.allclose(last[index, own], whole[index, own] * trainer.rank, atol=1e-6)
    finished = sum(sequence.is_finished for sequence in sequences)
    assert fed == [len(sequences), finished, len(sequences) if trainer.rank else 1]
    trainer.close()


def test_only_sequences_whose_value_is_wanted_are_fed(pool: RankPool, folder: Path) -> None:
    pool.call(check_wanted, folder)


def check_fed_in_update(state: State, folder: Path) -> None:
    trainer, trunk = start_trunk(folder, algorithm="t-ppo", mode="off")
    fed: list[int] = []
    hook = trunk.network["trunk"].register_forward_pre_hook(
        lambda _module, _args, given: fed.append(len(given["input_ids"])), with_kwargs=True
    )
    sequences = some_finished()
    prepared = trainer.prepare(sequences[trainer.rank :: 2], 0)
    assert prepared.planned is not None
    trainer.session.apply_plan(prepared.planned, prepared.trace)
    old_log_probs = trainer.recompute(prepared)
    assert fed == [len(batch.input_ids) for batch in prepared.batches]
    fed.clear()
    trainer.update(prepared, old_log_probs, 0)
    hook.remove()
    assert fed == [max(1, int(batch.finished.sum())) for batch in prepared.batches]
    assert sum(fed) < sum(len(batch.input_ids) for batch in prepared.batches)
    trainer.close()


def test_the_update_feeds_it_finished_responses(pool: RankPool, folder: Path) -> None:
    pool.call(check_fed_in_update, folder)


def train_some_steps(state: State, folder: Path, mode: str, algorithm: str) -> list[dict[str, float]]:
    trainer, _ = start_trunk(folder, algorithm=algorithm, mode=mode, learning_rate=1e-3, slots=2, token_budget=512)
    found = []
    for step in range(3):
        # Enough rows that a replica has work.
        _, metrics = trainer.train(some_finished(160)[trainer.rank :: 2], step, StepClock())
        found.append({name: metrics[name] for name in ("loss", "value/loss", "grad_norm", "value/replicas")})
    trainer.close()
    return found


@pytest.mark.parametrize("algorithm", ["ppo", "t-ppo"])
def test_balanced_and_unbalanced_runs_have_the_same_losses(pool: RankPool, folder: Path, algorithm: str) -> None:
    planned, off = (pool.call(train_some_steps, folder, mode, algorithm)[0] for mode in ("plan", "off"))
    for of_plan, of_off in zip(planned, off, strict=True):
        assert of_plan.pop("value/replicas") > 0
        assert of_off.pop("value/replicas") == 0
        assert of_plan == pytest.approx(of_off, rel=1e-4, abs=1e-6)
    assert planned[-1]["value/loss"] < planned[0]["value/loss"]


def train_one(state: State, folder: Path, value_model: str) -> dict[str, float]:
    """A step with fewer sequences than mini-batches."""
    trainer = start(folder, algorithm="ppo", value_model=value_model, mini_batches=4)
    # No response may have a token to train on yet.
    assert trainer.train([], 0, StepClock())[1]["loss"] == 0
    prepared, metrics = trainer.train(some_finished()[:1] if trainer.rank == 0 else [], 1, StepClock())
    assert prepared.schedule.num_micro_steps == 1
    trainer.close()
    return {name: metrics[name] for name in ("loss", "value/loss")}


def test_mini_batches_may_be_empty(pool: RankPool, folder: Path) -> None:
    head, trunk = (pool.call(train_one, folder, value_model)[0] for value_model in get_args(ValueModelName))
    # First values are 0.
    assert head == pytest.approx(trunk)
    assert head["value/loss"] > 0


def resume(state: State, folder: Path) -> None:
    trainer, trunk = start_trunk(folder, algorithm="t-ppo", window=2, max_new_tokens=7, learning_rate=1e-3, slots=2)
    (folder / "out" / "routing").mkdir(exist_ok=True)
    for step in range(2):
        trainer.step(step)
    again = save_and_resume(trainer, 2)
    again.session.settings.least_gain = trainer.session.settings.least_gain
    with mock.patch.object(balancer, "choose_quotas", quotas_of_few):
        for step in (2, 3):
            straight, resumed = (
                {name: value for name, value in each.step(step).items() if not name.endswith(("_s", "_bytes"))}
                for each in (trainer, again)
            )
            assert straight == resumed
            assert straight["value/replicas"] > 0
    states = [each.algorithm_state() for each in (trainer, again)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    if trainer.rank == 0:
        parameters = {name.removeprefix("parameter/") for name in states[0] if name.startswith("parameter/")}
        assert parameters == {*trunk.network.state_dict()}
        assert {f"exp_avg/{name}" for name in parameters} <= states[0].keys()
    for each in (trainer, again):
        each.close()


def test_a_run_resumes_bit_for_bit(pool: RankPool, folder: Path) -> None:
    pool.call(resume, folder)


def check_state(state: State, folder: Path) -> None:
    trainer, trunk = start_trunk(folder, algorithm="ppo", learning_rate=1e-3)
    trainer.train(some_finished()[trainer.rank :: 2], 0, StepClock())
    of_rank_0: list[Any] = [{name: value.clone() for name, value in trunk.state().items()}]
    dist.broadcast_object_list(of_rank_0)
    # Other weights and moments.
    trainer.train(some_finished()[trainer.rank :: 2], 1, StepClock())
    assert {*of_rank_0[0]} >= {"parameter/head.weight", "exp_avg/trunk.layers.0.mlp.experts.down_proj"}
    assert len(of_rank_0[0]["exp_avg/trunk.layers.0.mlp.experts.down_proj"]) == 8
    # Names of others are left alone.
    trunk.load_state(of_rank_0[0] | {"windows/length": torch.zeros(1)})
    after: list[Any] = [trunk.state()]
    dist.broadcast_object_list(after)
    assert of_rank_0[0].keys() == after[0].keys()
    assert all(torch.equal(value, after[0][name]) for name, value in of_rank_0[0].items())
    trainer.close()


def test_its_state_has_all_experts_in_logical_order(pool: RankPool, folder: Path) -> None:
    pool.call(check_state, folder)
