"""PPO on two ranks: gradients of a plain single-process PPO, the same losses under every policy, checkpoints."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.rank_pool import RankPool
from helpers.trainers import (
    LOG_RATIO,
    PlainValues,
    compare_gradients,
    make_folder,
    make_sequences,
    save_and_resume,
    start,
)
from trimtab.rl.config import TrainConfig, ValueModelName
from trimtab.rl.demo_model import load_model
from trimtab.rl.ppo import GAE_LAMBDA, PPO
from trimtab.rl.rollout import sample_groups
from trimtab.rl.sequences import Sequence
from trimtab.rl.step_metrics import StepClock
from trimtab.rl.task import draw_problem
from trimtab.rl.value_head import ValueHead
from trimtab.rl.value_model import VALUE_CLIP, clipped_value_loss

State = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("ppo"))


def test_the_value_loss_equals_its_definition() -> None:
    old, returns = torch.zeros(1, 5), torch.tensor([[1.0, 1.0, -1.0, 1.0, 0.1]])
    values = torch.tensor([[0.1, 0.5, 0.5, -0.5, 0.5]])
    # Clipped at 0.2: a value that has moved further has no gradient, unless it moved away from the return.
    expected = [0.9**2, 0.8**2, 1.5**2, 1.5**2, 0.4**2]
    assert VALUE_CLIP == 0.2
    for shift in (0.0, 0.3):
        found = clipped_value_loss(values + shift, old + shift, returns + shift)
        assert found.tolist()[0] == pytest.approx([x / 2 for x in expected])


def with_rewards(sequences: list[Sequence]) -> list[Sequence]:
    rng = np.random.default_rng(8)
    return [replace(sequence, reward=float(rng.random())) for sequence in sequences]


def plain_loss(model: Any, value_model: PlainValues, sequences: list[Sequence]) -> torch.Tensor:
    """The loss of PPO, from its definition, of a whole model that routes by itself."""
    loss = torch.zeros(())
    for sequence in sequences:
        tokens = torch.from_numpy(sequence.token_ids)
        at = slice(sequence.prompt_length - 1, sequence.num_fed)
        hidden = model.model(tokens[None, :-1]).last_hidden_state[0]
        targets = tokens[sequence.prompt_length :]
        log_probs = model.lm_head(hidden[at]).log_softmax(-1)[range(len(targets)), targets]
        values = value_model(tokens[:-1], hidden)[at]
        deltas = np.diff([*values.tolist(), sequence.reward])
        advantages = torch.tensor(
            [sum(GAE_LAMBDA ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))],
            dtype=torch.float32,
        )
        ratio = (log_probs - log_probs.detach() + LOG_RATIO).exp()
        loss = loss - torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
        loss = loss + 0.5 * ((values - (values.detach() + advantages)) ** 2).sum()
    return loss / sum(sequence.response_length for sequence in sequences)


def check_gradients(state: State, folder: Path, mode: str, value_model: str) -> None:
    given: dict[str, Any] = {"mini_batches": 1, "mode": mode, "value_model": value_model}
    if value_model == "trunk":
        given |= {"slots": 2, "gradient_checkpointing": mode == "plan"}
    trainer = start(folder, algorithm="ppo", **given)
    model: Any = load_model(folder / "model", trainer.model_config, torch.float32)
    torch.manual_seed(1)
    problems = [draw_problem(random.Random(problem), held_out=False) for problem in range(6)]
    sequences = with_rewards(sample_groups(model, trainer.tokenizer, problems, samples=2, max_new_tokens=6))
    compare_gradients(trainer, model, sequences, plain_loss)
    trainer.close()


@pytest.mark.parametrize("value_model", get_args(ValueModelName))
@pytest.mark.parametrize("mode", ["plan", "off"])
def test_gradients_equal_those_of_a_plain_ppo(pool: RankPool, folder: Path, mode: str, value_model: str) -> None:
    pool.call(check_gradients, folder, mode, value_model)


def train_some_steps(state: State, folder: Path, mode: str) -> list[list[float]]:
    trainer = start(folder, algorithm="ppo", mode=mode, learning_rate=1e-3)
    found = []
    for step in range(4):
        sequences = with_rewards(make_sequences(14, hot=True))
        _, metrics = trainer.train(sequences[trainer.rank :: 2], step, StepClock())
        found.append([metrics[name] for name in ("loss", "value/loss", "value/mean", "grad_norm")])
    trainer.close()
    return found


def test_balanced_and_unbalanced_runs_have_the_same_losses(pool: RankPool, folder: Path) -> None:
    planned, static, off = (pool.call(train_some_steps, folder, mode)[0] for mode in ("plan", "static", "off"))
    np.testing.assert_allclose(planned, static, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(planned, off, rtol=1e-4, atol=1e-6)
    # The value model learns the mean reward.
    value_losses = [step[1] for step in planned]
    assert value_losses[-1] < value_losses[0]


def resume(state: State, folder: Path) -> None:
    trainer = start(folder, algorithm="ppo", learning_rate=1e-3)
    sequences = with_rewards(make_sequences(14))[trainer.rank :: 2]
    for step in range(2):
        trainer.train(sequences, step, StepClock())
    again = save_and_resume(trainer, 2)
    metrics = [each.train(sequences, 2, StepClock())[1] for each in (trainer, again)]
    for name in ("loss", "value/loss", "value/mean", "grad_norm"):
        assert metrics[0][name] == metrics[1][name], name
    states = [each.algorithm_state() for each in (trainer, again)]
    assert {*states[0]} == {*states[1]}
    assert {name.split("/")[0] for name in states[0]} == {"parameter", "exp_avg", "exp_avg_sq", "step"}
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, states[0])
    assert all(torch.equal(value, of_ranks[1][name]) for name, value in of_ranks[0].items())
    for each in (trainer, again):
        each.close()


def test_a_checkpoint_has_the_value_model_and_its_optimizer(pool: RankPool, folder: Path) -> None:
    pool.call(resume, folder)


def test_all_sequences_are_trained() -> None:
    algorithm = PPO(ValueHead(4, TrainConfig.seed, torch.device("cpu")))
    sequences = [replace(sequence, advantage=0.0) for sequence in make_sequences(3)]
    assert algorithm.trained(sequences) == sequences
