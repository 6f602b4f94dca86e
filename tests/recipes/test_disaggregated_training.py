"""Training with a disaggregated rollout is that with a colocated one: sequences, plan, weights, and resuming."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from helpers.examples import nightly_except
from helpers.rank_pool import on_ranks
from helpers.runs import assert_equal, run
from helpers.trainers import save_and_resume, start
from recipes.disaggregated_rollout.train import DisaggregatedConfig, DisaggregatedTrainer, main
from recipes.rl import task
from recipes.rl.responses import Response
from recipes.rl.task import Problem
from recipes.rl.train import Trainer


def in_float32(folder: Any, config: Any, dtype: torch.dtype) -> Any:
    del dtype
    return LOAD(folder, config, torch.float32)


LOAD = task.load_model


def assert_equal_responses(found: list[Response], expected: list[Response]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.expert_ids, other.expert_ids)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
        assert (one.prompt_length, one.reward, one.advantage) == (other.prompt_length, other.reward, other.advantage)


def assert_loaded(trainer: DisaggregatedTrainer) -> None:
    """The rollout holds the trained weights; an expert rank's slots those of their experts."""
    remote, whole = trainer.remote, trainer.session.whole_state_dict(trainer.model)
    if remote.is_attention:
        own = {name: value for name, value in remote.model.state_dict().items() if not value.is_meta}
        assert {name for name in whole if ".experts." not in name} == own.keys()
        assert_equal(own, {name: whole[name] for name in own})
    for layer, tensors in enumerate(remote.weights_L):
        experts = torch.from_numpy(remote.slots.slots_LXS[layer, trainer.rank - remote.num_attention])
        assert_equal(tensors, {name: whole[name][experts] for name in tensors})


def train_both(folder: Path, attention: int, experts: int, micro_batches: int, mode: str) -> None:
    common: dict[str, Any] = {"mode": mode, "slots": 1, "problems": 8, "learning_rate": 0.01, "samples": 6}
    common |= {"policy": "quota"} if mode == "live" else {}
    ranks = {"attention_ranks": attention, "expert_ranks": experts, "micro_batches": micro_batches}
    metrics: list[list[Any]] = [[], []]
    with (
        mock.patch.object(task, "load_model", in_float32),
        mock.patch.object(Problem, "reward", lambda self, response: float(len(response) % 3)),
    ):
        colocated: Trainer = start(folder, **common)
        remote: Any = start(folder, DisaggregatedTrainer, DisaggregatedConfig, **ranks, **common)
        for step in range(2):
            responses = [trainer.rollout(step) for trainer in (colocated, remote)]
            assert_equal_responses(responses[1], responses[0])
            for trainer, mine, steps in zip((colocated, remote), responses, metrics, strict=True):
                with mock.patch.object(trainer, "rollout", lambda _step, mine=mine: mine):
                    steps.append(trainer.step(step))
        assert_loaded(remote)
        for trainer in (colocated, remote):
            trainer.measure_accuracy("end")
        assert colocated.held_out_accuracy == remote.held_out_accuracy
        for one, other in zip(colocated.model.parameters(), remote.model.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-5)
        assert any(m["grad_norm"] > 0 for m in metrics[0])
        for one, other in zip(*metrics, strict=True):
            assert (other["loss"], other["grad_norm"]) == pytest.approx((one["loss"], one["grad_norm"]), rel=1e-4)
            assert 0 <= other["rollout/expert_max_vio"] <= experts - 1
        assert (sum(m["rollout/replaced_experts"] for m in metrics[1]) > 0) == (experts > 1)
        # A resumed run has the placement of the routing that was written.
        resumed: Any = save_and_resume(remote, 2)
        np.testing.assert_array_equal(resumed.remote.slots.slots_LXS, remote.remote.slots.slots_LXS)
        assert_loaded(resumed)
        for trainer in (colocated, remote, resumed):
            trainer.close()


@pytest.mark.parametrize(
    ("attention", "experts", "micro_batches", "mode"),
    nightly_except([(1, 1, 1, "plan"), (1, 1, 3, "live"), (2, 2, 2, "plan"), (3, 1, 2, "static")], (1, 1, 1, "plan")),
)
def test_training_is_that_with_a_colocated_rollout(
    folder: Path, attention: int, experts: int, micro_batches: int, mode: str
) -> None:
    on_ranks(train_both, (folder, attention, experts, micro_batches, mode), ranks=attention + experts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--algorithm t-ppo", "the rollout generates whole responses; --algorithm should be grpo or ppo"),
        ("--attention-ranks 2", "2 attention ranks and 1 expert ranks are 3; together they should be the 2 ranks"),
        ("--ranks 4 --expert-ranks 3", "3 expert ranks don't divide 8 experts"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-o", str(tmp_path / "out"), *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_short_run_has_the_metrics_of_both_sides(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.disaggregated_rollout.train", "-o", str(tmp_path / "out")]
    few = "--warm-start-steps 2 --held-out 8 --problems 4 --samples 4 --steps 2 --compare-pairs 0 --micro-batches 3"
    run([*command, *few.split()])
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert all("rollout/expert_max_vio" in json.loads(line) for line in lines)
    assert len(lines) == 2
