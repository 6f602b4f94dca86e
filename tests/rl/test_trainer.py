"""One RL step on two ranks: loss, metrics, weights of the rollout, resuming, checked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.live_runs import quotas_of_few
from helpers.rank_pool import RankPool
from helpers.runs import save_tiny_model
from helpers.trainers import make_sequences, start
from trimtab.rl import trainer as trainer_module
from trimtab.rl.checkpoint import last_checkpoint
from trimtab.rl.collectives import reduce
from trimtab.rl.sequences import Sequence
from trimtab.rl.step_metrics import StepClock
from trimtab.rl.task import Problem
from trimtab.rl.trainer import PreparedStep, Trainer
from trimtab.runtime.live import balancer

State = dict[str, Any]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer")
    save_tiny_model(folder / "model")
    (folder / "out").mkdir()
    return folder


def apply(trainer: Trainer, sequences: list[Sequence]) -> tuple[PreparedStep, list[torch.Tensor]]:
    """Plan a step of this rank's sequences and recompute it."""
    prepared = trainer.prepare(sequences, 0)
    assert prepared.planned is not None
    trainer.session.apply_plan(prepared.planned, prepared.trace)
    return prepared, trainer.recompute(prepared)


def losses(state: State, folder: Path) -> tuple[list[float], list[float]]:
    """Loss of each mini-batch, found and expected."""
    trainer, sequences = start(folder), make_sequences(13)
    prepared, old_log_probs = apply(trainer, sequences[trainer.rank :: 2])
    found = []
    for mini_batch in range(2):
        found.append(reduce(trainer.accumulate(prepared, old_log_probs, mini_batch)["loss"], CPU))
        trainer.optimizer.zero_grad()
    assert trainer.session.take_metrics()["moe/unplanned_micro_steps"] == 0
    trainer.close()
    # Every second sequence in rank order. Before the update the ratio is 1.
    of_ranks = [*sequences[0::2], *sequences[1::2]]
    expected = []
    for part in (of_ranks[0::2], of_ranks[1::2]):
        tokens = [len(s.token_ids) - s.prompt_length for s in part]
        expected.append(-sum(n * s.advantage for n, s in zip(tokens, part, strict=True)) / sum(tokens))
    return found, expected


def test_loss_is_the_mean_over_the_response_tokens_of_the_mini_batch(pool: RankPool, folder: Path) -> None:
    for found, expected in pool.call(losses, folder):
        assert found == pytest.approx(expected, rel=1e-5)
        assert abs(expected[0] - expected[1]) > 0.1


def update_once(state: State, folder: Path) -> tuple[float, list[float]]:
    """Sum over response tokens of advantage times rise of the log-probability; learning rates of three steps."""
    trainer, sequences = start(folder, learning_rate=3e-3), make_sequences(12)
    prepared, before = apply(trainer, sequences[trainer.rank :: 2])
    trainer.update(prepared, before, step=10)
    rise = 0.0
    for batch, old, new in zip(prepared.batches, before, trainer.recompute(prepared), strict=True):
        rise += float(((new - old) * batch.response_mask * batch.advantages).sum())
    rates = []
    for step in (0, 1, 20):
        trainer.update(prepared, before, step)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    trainer.close()
    return reduce(rise, CPU), rates


def test_an_update_raises_responses_with_positive_advantage(pool: RankPool, folder: Path) -> None:
    for rise, rates in pool.call(update_once, folder):
        assert rise > 0.1
        assert rates == pytest.approx([1e-3, 2e-3, 3e-3])


def clip_some(state: State, folder: Path) -> tuple[float, float]:
    """Clip fraction if the tokens of the second mini-batch alone are clipped, found and expected."""
    trainer, sequences = start(folder, learning_rate=0.0), make_sequences(13)
    prepared, log_probs = apply(trainer, sequences[trainer.rank :: 2])
    second = set(prepared.schedule.micro_steps_of(1))
    # Ratios exp(0.1) and exp(-0.3).
    shifted = [values + (0.3 if index in second else -0.1) for index, values in enumerate(log_probs)]
    found = trainer.update(prepared, shifted, step=0)["ppo/clip_fraction"]
    trainer.close()
    of_ranks = [*sequences[0::2], *sequences[1::2]]
    tokens = [len(s.token_ids) - s.prompt_length for s in of_ranks]
    return found, sum(tokens[1::2]) / sum(tokens)


def test_clip_fraction_counts_response_tokens_of_all_mini_batches(pool: RankPool, folder: Path) -> None:
    for found, expected in pool.call(clip_some, folder):
        assert found == pytest.approx(expected)


def compare_rollouts(state: State, folder: Path) -> list[float]:
    """`ppo/rollout_logprob_diff` with the recorded experts, and with those of the token before."""
    trainer = start(folder, samples=8)
    # A model whose log-probabilities depend on its experts.
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if name.endswith("down_proj"):
                parameter.mul_(6)
            elif name.startswith("lm_head"):
                parameter.mul_(4)
    trainer.sync_rollout()
    sequences = trainer.rollout(0)
    assert all(len(s.log_probs) == s.response_length for s in sequences)
    differences = []
    for shift in (0, 1):
        shifted = [replace(s, expert_ids=np.roll(s.expert_ids, shift, axis=0)) for s in sequences]
        differences.append(trainer.rollout_difference(*apply(trainer, shifted)))
    trainer.close()
    return differences


def test_rollout_difference_shows_wrong_routing(pool: RankPool, folder: Path) -> None:
    for right, wrong in pool.call(compare_rollouts, folder):
        assert 0 < right < 0.1
        assert wrong > 1


def run_a_step(state: State, folder: Path) -> None:
    """The rollout model gets the trained weights; metrics are those of all ranks."""
    trainer = start(folder, learning_rate=0.02)
    assert_synced(trainer)
    before = {name: value.clone() for name, value in trainer.rollout_model.state_dict().items()}
    rolled_out: list[Sequence] = []
    roll_out, micro_step, taken = trainer.rollout, trainer.micro_step, trainer.session.take_metrics
    entered: list[int] = []
    counters: list[dict[str, float]] = []

    def roll_out_and_keep(step: int) -> list[Sequence]:
        rolled_out.extend(roll_out(step))
        return rolled_out

    def enter(batch: Any, index: int) -> Any:
        entered.append(index)
        return micro_step(batch, index)

    def take() -> dict[str, float]:
        # Without replicas the real figures are 0.
        counters.append(taken() | {"transfer/peer_bytes": 100.0 + trainer.rank})
        return counters[-1]

    with (
        mock.patch.object(Problem, "reward", lambda self, response: float(len(response) % 3)),
        mock.patch.object(trainer, "rollout", roll_out_and_keep),
        mock.patch.object(trainer, "micro_step", enter),
        mock.patch.object(trainer.session, "take_metrics", take),
        mock.patch.object(trainer, "write_routing"),
    ):
        metrics = trainer.step(4)
    own = (rolled_out, counters[-1])
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, own)
    everything = [sequence for sequences, _ in gathered for sequence in sequences]
    assert len(everything) == trainer.config.problems * trainer.config.samples
    assert metrics["step"] == 4
    assert metrics["reward"] == pytest.approx(np.mean([s.reward for s in everything]))
    assert metrics["response_length"] == pytest.approx(np.mean([s.response_length for s in everything]))
    assert metrics["trained_sequences"] == sum(s.advantage != 0 for s in everything) > 0
    assert metrics["moe/micro_steps"] == len(entered)
    for name, value in counters[-1].items():
        values = [of_rank[name] for _, of_rank in gathered]
        assert metrics[name] == pytest.approx(value if name.startswith("moe/") else sum(values)), name
    assert metrics["transfer/peer_bytes"] == 201

    assert 0 < metrics["ppo/rollout_logprob_diff"] < 0.1
    assert_synced(trainer)
    changed = [not torch.equal(value, before[name]) for name, value in trainer.rollout_model.state_dict().items()]
    assert sum(changed) > len(changed) / 2
    trainer.close()


def train_from_live_routing(state: State, folder: Path) -> list[list[dict[str, Any]]]:
    """Metrics of two steps with and without replicas, of the same sequences."""
    found = []
    with mock.patch.object(balancer, "choose_quotas", quotas_of_few):
        for policy in ("off", "quota"):
            trainer = start(folder, mode="live", policy=policy, slots=2, gradient_checkpointing=policy == "quota")
            with mock.patch.object(trainer.session, "plan_ahead", side_effect=AssertionError):
                trainer.rollout(0)
            mine = make_sequences(16)[trainer.rank :: 2]
            found.append([trainer.train(mine, step, StepClock())[1] for step in range(2)])
            trainer.close()
    return found


def test_live_routing_with_replicas_trains_as_without(pool: RankPool, folder: Path) -> None:
    for unbalanced, balanced in pool.call(train_from_live_routing, folder):
        for expected, actual in zip(unbalanced, balanced, strict=True):
            for name in ("loss", "grad_norm", "ppo/rollout_logprob_diff", "live/max_vio_before"):
                assert actual[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
            assert expected["moe/replicas"] == expected["transfer/gradient_bytes"] == 0
            assert expected["live/max_vio_after"] == expected["live/max_vio_before"]
            assert actual["moe/replicas"] == actual["live/replicas"] > 0
            assert actual["transfer/gradient_bytes"] > 0
            assert actual["moe/max_vio_after"] == actual["live/max_vio_after"] < actual["live/max_vio_before"] / 2
            assert actual["moe/max_vio_before"] == actual["live/max_vio_before"]
            # Of two layers. What a checkpoint runs again is the same call.
            assert actual["live/calls"] == expected["live/calls"] == 2 * expected["moe/micro_steps"] > 0
            assert "planning_s" not in actual


def assert_synced(trainer: Trainer) -> None:
    trained, synced = trainer.session.logical_state_dict(trainer.model), trainer.rollout_model.state_dict()
    assert trained.keys() == synced.keys()
    for name, value in trained.items():
        assert torch.equal(synced[name], value.to(torch.bfloat16)), name


def test_the_rollout_gets_the_trained_weights_and_metrics_are_of_all_ranks(pool: RankPool, folder: Path) -> None:
    pool.call(run_a_step, folder)


def measure_by_rank(state: State, folder: Path) -> tuple[float, list[list[str]]]:
    """Accuracy if rank 0 alone solves its problems; the prompts of two rollouts."""
    trainer = start(folder, problems=9)
    prompts: list[list[str]] = []

    def count(_model: Any, _tokenizer: Any, problems: list[Problem], **_: Any) -> int:
        return len(problems) if trainer.rank == 0 else 0

    def keep(_model: Any, _tokenizer: Any, problems: list[Problem], **_: Any) -> list[Sequence]:
        assert not any(problem.held_out for problem in problems)
        prompts.append([problem.prompt for problem in problems])
        return []

    with mock.patch.object(trainer_module, "count_correct", count):
        trainer.measure_accuracy("now")
    with mock.patch.object(trainer_module, "sample_groups", keep):
        for step in (0, 1, 0):
            trainer.rollout(step)
    trainer.close()
    return trainer.held_out_accuracy["now"], prompts


def test_problems_are_divided_among_ranks(pool: RankPool, folder: Path) -> None:
    (accuracy, first), (same, second) = pool.call(measure_by_rank, folder)
    assert accuracy == same == 0.5
    for one, other in zip(first, second, strict=True):
        assert (len(one), len(other)) == (5, 4)
    steps = [one + other for one, other in zip(first, second, strict=True)]
    assert steps[0] == steps[2] != steps[1]
    # Equal prompts on both ranks are rare.
    assert len(set(first[0]) & set(second[0])) <= 2


def save_and_resume(state: State, folder: Path) -> None:
    trainer = start(folder, learning_rate=0.01)
    prepared, old_log_probs = apply(trainer, make_sequences(12, hot=True)[trainer.rank :: 2])
    trainer.update(prepared, old_log_probs, step=9)
    trainer.held_out_accuracy = {"after warm start": 0.25}
    trainer.save(2)
    trainer.save(10)
    dist.barrier()
    checkpoint = last_checkpoint(folder / "out")
    assert checkpoint is not None
    again = Trainer(trainer.config, checkpoint)
    assert again.first_step == checkpoint.step == 10
    assert again.held_out_accuracy == {"after warm start": 0.25}
    assert np.array_equal(again.session.placement.home, trainer.session.placement.home)
    expected = trainer.session.logical_state_dict(trainer.model)
    for name, value in again.session.logical_state_dict(again.model).items():
        assert torch.equal(value, expected[name]), name
        assert torch.equal(again.rollout_model.state_dict()[name], value.to(torch.bfloat16)), name
    states = [dict(t.session.logical.optimizer_state(t.model, t.optimizer)) for t in (trainer, again)]
    assert states[0].keys() == states[1].keys()
    for name, values in states[0].items():
        for key, state_value in values.items():
            assert torch.equal(torch.as_tensor(states[1][name][key]), torch.as_tensor(state_value)), (name, key)
    assert bool(states[0]) == (trainer.rank == 0)
    for each in (trainer, again):
        each.close()


def test_a_run_resumes_after_the_step_of_its_last_checkpoint(pool: RankPool, folder: Path) -> None:
    pool.call(save_and_resume, folder)
