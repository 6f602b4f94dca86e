"""PPO on two ranks: gradients of a plain single-process PPO, the same losses under every policy, checkpoints."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from helpers.rank_tests import of_all_ranks, runs_on_ranks
from helpers.trainers import (
    LOG_RATIO,
    PlainValues,
    assert_equal_states,
    compare_gradients,
    discounted,
    make_sequences,
    plain_response,
    save_and_resume,
    start,
    start_for_gradients,
)
from trimtab.rl.config import TrainConfig, ValueModelName
from trimtab.rl.ppo import PPO
from trimtab.rl.rollout import sample_groups
from trimtab.rl.sequences import Sequence
from trimtab.rl.step_metrics import StepClock
from trimtab.rl.task import draw_problem
from trimtab.rl.value_head import ValueHead
from trimtab.rl.value_model import VALUE_CLIP, clipped_value_loss
from trimtab.runtime.session_settings import Mode


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
        log_probs, values = plain_response(model, value_model, sequence)
        deltas = np.diff([*values.tolist(), sequence.reward])
        advantages = torch.tensor([discounted(deltas[t:]) for t in range(len(deltas))], dtype=torch.float32)
        ratio = (log_probs - log_probs.detach() + LOG_RATIO).exp()
        loss = loss - torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
        loss = loss + 0.5 * ((values - (values.detach() + advantages)) ** 2).sum()
    return loss / sum(sequence.response_length for sequence in sequences)


@pytest.mark.parametrize("value_model", get_args(ValueModelName))
@pytest.mark.parametrize("mode", ["plan", "off"])
@runs_on_ranks()
def test_gradients_equal_those_of_a_plain_ppo(folder: Path, mode: Mode, value_model: ValueModelName) -> None:
    trainer, model = start_for_gradients(folder, "ppo", mode, value_model)
    torch.manual_seed(1)
    problems = [draw_problem(random.Random(problem), held_out=False) for problem in range(6)]
    sequences = with_rewards(sample_groups(model, trainer.tokenizer, problems, samples=2, max_new_tokens=6))
    compare_gradients(trainer, model, sequences, plain_loss)
    trainer.close()


@runs_on_ranks()
def test_a_checkpoint_has_the_value_model_and_its_optimizer(folder: Path) -> None:
    trainer = start(folder, algorithm="ppo", learning_rate=1e-3)
    sequences = with_rewards(make_sequences(14))[trainer.rank :: 2]
    for step in range(2):
        trainer.train(sequences, step, StepClock())
    again = save_and_resume(trainer, 2)
    metrics = [each.train(sequences, 2, StepClock())[1] for each in (trainer, again)]
    for name in ("loss", "value/loss", "value/mean", "grad_norm"):
        assert metrics[0][name] == metrics[1][name], name
    states = [each.algorithm_state() for each in (trainer, again)]
    assert_equal_states(*states)
    assert {name.split("/")[0] for name in states[0]} == {"parameter", "exp_avg", "exp_avg_sq", "step"}
    assert_equal_states(*of_all_ranks(states[0]))
    for each in (trainer, again):
        each.close()


def test_all_sequences_are_trained() -> None:
    algorithm = PPO(ValueHead(4, TrainConfig.seed, torch.device("cpu")))
    sequences = [replace(sequence, advantage=0.0) for sequence in make_sequences(3)]
    assert algorithm.trained(sequences) == sequences
