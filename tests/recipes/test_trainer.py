"""One RL step on two ranks: loss, metrics, weights of the rollout, resuming, checked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from helpers.random_choices import quotas_of_few
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from helpers.runs import assert_equal
from helpers.trainers import make_responses, plan_and_recompute, start, strengthen_experts
from recipes.rl import train
from recipes.rl.responses import Response
from recipes.rl.task import Problem
from recipes.rl.train import Trainer
from trimtab.runtime.live import balancer


@runs_on_ranks()
def test_loss_is_the_mean_over_the_response_tokens_of_the_mini_batch(folder: Path) -> None:
    trainer, sequences = start(folder), make_responses(13)
    prepared, old_log_probs = plan_and_recompute(trainer, sequences[trainer.rank :: 2])
    found = []
    for mini_batch in range(2):
        found.append(trainer.total(trainer.accumulate(prepared, old_log_probs, mini_batch)["loss"]))
        trainer.optimizer.zero_grad()
    assert trainer.session.take_metrics()["moe/unplanned_micro_steps"] == 0
    trainer.close()
    # Every second sequence in rank order. Before the update the ratio is 1.
    of_ranks = [*sequences[0::2], *sequences[1::2]]
    expected = []
    for part in (of_ranks[0::2], of_ranks[1::2]):
        tokens = [s.length for s in part]
        expected.append(-sum(n * s.advantage for n, s in zip(tokens, part, strict=True)) / sum(tokens))
    assert found == pytest.approx(expected, rel=1e-5)
    assert abs(expected[0] - expected[1]) > 0.1


@runs_on_ranks()
def test_an_update_raises_responses_with_positive_advantage(folder: Path) -> None:
    trainer, sequences = start(folder, learning_rate=3e-3), make_responses(12)
    prepared, before = plan_and_recompute(trainer, sequences[trainer.rank :: 2])
    trainer.update(prepared, before, step=10)
    rise = 0.0
    for batch, old, new in zip(prepared.batches, before, trainer.recompute(prepared), strict=True):
        rise += float(((new - old) * batch.response_mask * batch.advantages).sum())
    rates = []
    for step in (0, 1, 20):
        trainer.update(prepared, before, step)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert trainer.total(rise) > 0.1
    trainer.close()
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3])


@runs_on_ranks()
def test_clip_fraction_counts_response_tokens_of_all_mini_batches(folder: Path) -> None:
    """The tokens of the second mini-batch alone are clipped."""
    trainer, sequences = start(folder, learning_rate=0.0), make_responses(13)
    prepared, log_probs = plan_and_recompute(trainer, sequences[trainer.rank :: 2])
    second = set(prepared.schedule.micro_steps_of(1))
    # Ratios exp(0.1) and exp(-0.3).
    shifted = [values + (0.3 if index in second else -0.1) for index, values in enumerate(log_probs)]
    found = trainer.update(prepared, shifted, step=0)["ppo/clip_fraction"]
    trainer.close()
    tokens = [s.length for s in (*sequences[0::2], *sequences[1::2])]
    assert found == pytest.approx(sum(tokens[1::2]) / sum(tokens))


@runs_on_ranks()
def test_rollout_difference_shows_wrong_routing(folder: Path) -> None:
    """With the recorded experts, and with those of the token before."""
    trainer = start(folder, samples=8)
    strengthen_experts(trainer)
    trainer.sync_rollout()
    sequences = trainer.rollout(0)
    assert all(len(s.log_probs) == s.length for s in sequences)
    differences = []
    for shift in (0, 1):
        shifted = [replace(s, expert_ids=np.roll(s.expert_ids, shift, axis=0)) for s in sequences]
        differences.append(trainer.rollout_difference(*plan_and_recompute(trainer, shifted)))
    trainer.close()
    right, wrong = differences
    assert 0 < right < 0.1
    assert wrong > 0.5


@runs_on_ranks()
def test_the_rollout_gets_the_trained_weights_and_metrics_are_of_all_ranks(folder: Path) -> None:
    trainer = start(folder, learning_rate=0.02, samples=16)
    assert_synced(trainer)
    before = {name: value.clone() for name, value in trainer.rollout_model.state_dict().items()}
    rolled_out: list[Response] = []
    roll_out, taken = trainer.rollout, trainer.session.take_metrics
    counters: list[dict[str, float]] = []
    planned = {"plan/waited_s": 1e6, "moe/planned_replicas": 7.0, "moe/planned_max_vio": 0.5}

    def roll_out_and_keep(step: int) -> list[Response]:
        rolled_out.extend(roll_out(step))
        return rolled_out

    def take() -> dict[str, float]:
        # Without replicas the real figures are 0, and none are planned while the step runs.
        counters.append(taken() | {"transfer/peer_bytes": 100.0 + trainer.rank} | planned)
        return counters[-1]

    with (
        mock.patch.object(Problem, "reward", lambda self, response: float(len(response) % 3)),
        mock.patch.object(trainer, "rollout", roll_out_and_keep),
        mock.patch.object(trainer, "micro_step", wraps=trainer.micro_step) as entered,
        mock.patch.object(trainer.session, "take_metrics", take),
        mock.patch.object(train, "write_trace"),
    ):
        metrics = trainer.step(4)
    gathered = of_all_ranks((rolled_out, counters[-1]))
    everything = [sequence for sequences, _ in gathered for sequence in sequences]
    assert len(everything) == trainer.config.problems * trainer.config.samples
    assert metrics["step"] == 4
    assert metrics["reward"] == pytest.approx(np.mean([s.reward for s in everything]))
    assert metrics["response_length"] == pytest.approx(np.mean([s.length for s in everything]))
    assert metrics["trained_sequences"] == sum(s.advantage != 0 for s in everything) > 0
    assert metrics["moe/micro_steps"] == entered.call_count
    for name, value in counters[-1].items():
        values = [of_rank[name] for _, of_rank in gathered]
        assert metrics[name] == pytest.approx(value if name.startswith(("moe/", "plan/")) else sum(values)), name
    assert metrics["transfer/peer_bytes"] == 201
    assert metrics["waited_s"] > 1e6
    assert (metrics["moe/replicas"], metrics["moe/max_vio_after"], metrics["plan/background_s"]) == (7, 0.5, 0)

    assert 0 < metrics["ppo/rollout_logprob_diff"] < 0.1
    assert_synced(trainer)
    changed = [not torch.equal(value, before[name]) for name, value in trainer.rollout_model.state_dict().items()]
    assert sum(changed) > len(changed) / 2
    trainer.close()


@runs_on_ranks()
def test_live_routing_with_replicas_trains_as_without(folder: Path) -> None:
    found = []
    with mock.patch.object(balancer, "choose_quotas", quotas_of_few):
        for policy in ("off", "quota"):
            trainer = start(folder, mode="live", policy=policy, slots=2)
            with mock.patch.object(trainer.session, "plan_ahead", side_effect=AssertionError):
                trainer.rollout(0)
            mine = make_responses(16)[trainer.rank :: 2]
            found.append([trainer.train(mine, step)[1] for step in range(2)])
            trainer.close()
    for expected, actual in zip(*found, strict=True):
        for name in ("loss", "grad_norm", "ppo/rollout_logprob_diff", "live/max_vio_before"):
            assert actual[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        assert expected["moe/replicas"] == expected["transfer/gradient_bytes"] == 0
        assert expected["live/max_vio_after"] == expected["live/max_vio_before"]
        assert actual["moe/replicas"] == actual["live/replicas"] > 0
        assert actual["transfer/gradient_bytes"] > 0
        assert actual["moe/max_vio_after"] == actual["live/max_vio_after"] < actual["live/max_vio_before"] / 2
        assert actual["moe/max_vio_before"] == actual["live/max_vio_before"]
        # Of two layers.
        assert actual["live/calls"] == expected["live/calls"] == 2 * expected["moe/micro_steps"] > 0
        assert "planning_s" not in actual


def assert_synced(trainer: Trainer) -> None:
    trained = trainer.session.whole_state_dict(trainer.model)
    rounded = {name: value.to(torch.bfloat16) for name, value in trained.items()}
    assert_equal(rounded, trainer.rollout_model.state_dict())


@runs_on_ranks()
def test_problems_are_divided_among_ranks(folder: Path) -> None:
    trainer = start(folder, problems=9)
    prompts: list[list[str]] = []
    draws: list[bytes] = []

    def keep(_model: Any, _tokenizer: Any, problems: list[Problem], uniforms: Any, _count: Any) -> list[Response]:
        assert not any(problem.held_out for problem in problems)
        prompts.append([problem.prompt for problem in problems])
        draws.append(uniforms.tobytes())
        return []

    # Rank 0 alone solves its problems.
    with mock.patch.object(train, "count_solved", lambda _tokenizer, mine, _tokens: len(mine) * (trainer.rank == 0)):
        trainer.measure_accuracy("now")
    with mock.patch.object(train, "sample_groups", keep):
        for step in (0, 1, 0):
            trainer.rollout(step)
    trainer.close()
    assert trainer.held_out_accuracy["now"] == 0.5
    (first, draws), (second, others) = of_all_ranks((prompts, draws))
    for one, other in zip(first, second, strict=True):
        assert (len(one), len(other)) == (5, 4)
    steps = [one + other for one, other in zip(first, second, strict=True)]
    assert steps[0] == steps[2] != steps[1]
    # Equal prompts on both ranks are rare.
    assert len(set(first[0]) & set(second[0])) <= 2
    assert (draws[0], others[0]) == (draws[2], others[2])
    assert len({*draws, *others}) == 4


@runs_on_ranks()
def test_weights_of_renumbered_experts_reach_the_rollout(folder: Path) -> None:
    trainer = start(folder)
    trainer.session.renumber([np.arange(trainer.session.num_experts)[::-1]] * len(trainer.session.layers))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn(parameter.shape) * (1 if parameter.ndim == 3 else 0))
    trainer.session.weights_changed()
    trainer.sync_rollout()
    assert_synced(trainer)
    trainer.close()


def response(prompt: int, known: int, new: int, *, is_finished: bool) -> Response:
    """A response whose first tokens are of an earlier step."""
    length = prompt + known + new
    arrays = (
        np.ones(length, np.int64),
        prompt,
        np.zeros((length - 1, 1, 1), np.uint8),
        np.zeros(known + new, np.float32),
    )
    return Response(*arrays, float(is_finished), is_finished=is_finished, known_tokens=known)


@runs_on_ranks()
def test_ranks_wait_for_the_longest_response(folder: Path) -> None:
    trainer = start(folder)
    responses = [response(3, 5, 2, is_finished=True), response(4, 0, 3, is_finished=False)]
    responses += [response(2, 0, 4, is_finished=True), response(6, 9, 1, is_finished=False)]
    found = trainer.rollout_metrics(responses)
    trainer.close()
    assert found["rollout/decode_steps"] == 4
    assert found["rollout/tokens"] == 2 + 3 + 4 + 1
    assert found["rollout/occupancy"] == pytest.approx(10 / 16)
    assert found["rollout/prefix_tokens"] == 8 + 4 + 2 + 15
    assert found["rollout/longest_response"] == 10
    assert found["rollout/finished"] == 2
    assert found["response_length"] == pytest.approx((7 + 4) / 2)
    assert found["reward"] == 1.0
