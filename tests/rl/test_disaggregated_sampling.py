"""Training with a disaggregated rollout is that with a colocated one: sequences, plan, weights, and resuming."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.examples import nightly_except
from helpers.moe_families import small_config
from helpers.rank_pool import on_ranks
from helpers.trainers import save_and_resume, start
from trimtab.cli.main import main
from trimtab.errors import InputError
from trimtab.rl import trainer as trainer_module
from trimtab.rl.config import TrainConfig
from trimtab.rl.demo_model import load_model
from trimtab.rl.disaggregated_sampling import check_disaggregated, response_draws
from trimtab.rl.sequences import Sequence
from trimtab.rl.task import Problem
from trimtab.rl.trainer import Trainer
from trimtab.trace import RoutingTrace


def in_float32(directory: Any, config: Any, dtype: torch.dtype) -> Any:
    del dtype
    return load_model(directory, config, torch.float32)


def assert_equal_sequences(found: list[Sequence], expected: list[Sequence]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.expert_ids, other.expert_ids)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
        assert (one.prompt_length, one.reward, one.advantage) == (other.prompt_length, other.reward, other.advantage)


def assert_loaded(trainer: Trainer) -> None:
    """The expert ranks' slots hold the trained experts."""
    assert trainer._remote is not None
    rollout = trainer._remote.rollout
    whole = trainer.session.logical_state_dict(trainer.model)
    names = [name for name in whole if ".experts." in name]
    if rollout.weights_L is not None:
        mine = rollout.slots.slots_LXS[:, dist.get_rank() - rollout.num_attention]
        stacks = iter(names)
        for experts, tensors in zip(mine, rollout.weights_L, strict=True):
            for tensor in tensors:
                assert torch.equal(tensor, whole[next(stacks)][torch.from_numpy(experts)])
    else:
        own = rollout.model.state_dict()
        assert all(torch.equal(own[name], value) for name, value in whole.items() if name not in names)


def train_both(folder: Path, attention: int, experts: int, micro_batches: int, mode: str) -> None:
    common: dict[str, Any] = {"mode": mode, "slots": 1, "problems": 8, "learning_rate": 0.01, "samples": 6}
    common |= {"policy": "quota"} if mode == "live" else {}
    ranks = {"attention_ranks": attention, "expert_ranks": experts, "micro_batches": micro_batches}

    def keep(traces: list[Any], trace: RoutingTrace, *, token_budget: int) -> None:
        traces.append(trace)

    ahead: list[list[Any]] = [[], []]
    metrics: list[list[Any]] = [[], []]
    with (
        mock.patch.object(trainer_module, "load_model", in_float32),
        mock.patch.object(Problem, "reward", lambda self, response: float(len(response) % 3)),
    ):
        trainers = [start(folder, **common), start(folder, rollout="disaggregated", **ranks, **common)]
        for trainer, traces in zip(trainers, ahead, strict=True):
            trainer.session.plan_ahead = partial(keep, traces)  # type: ignore[method-assign]
        for step in range(2):
            sequences = [trainer.rollout(step) for trainer in trainers]
            assert_equal_sequences(sequences[1], sequences[0])
            for trainer, mine, steps in zip(trainers, sequences, metrics, strict=True):
                with mock.patch.object(trainer, "rollout", lambda _step, mine=mine: mine):
                    steps.append(trainer.step(step))
        assert_loaded(trainers[1])
        for before, after in zip(*ahead, strict=True):
            np.testing.assert_array_equal(before.sequence_hashes, after.sequence_hashes)
        for trainer in trainers:
            trainer.measure_accuracy("end")
        assert trainers[0].held_out_accuracy == trainers[1].held_out_accuracy
        pairs = zip(trainers[0].model.parameters(), trainers[1].model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        assert any(m["grad_norm"] > 0 for m in metrics[0])
        for one, other in zip(*metrics, strict=True):
            assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
            assert 0 <= other["rollout/expert_max_vio"] <= experts - 1
        remote = trainers[1]._remote
        assert remote is not None
        assert (sum(m["rollout/replaced_experts"] for m in metrics[1]) > 0) == (experts > 1)
        # A resumed run has the placement of the routing that was written.
        resumed = save_and_resume(trainers[1], 2)
        assert resumed._remote is not None
        np.testing.assert_array_equal(resumed._remote.rollout.slots.slots_LXS, remote.rollout.slots.slots_LXS)
        assert_loaded(resumed)
        for trainer in (*trainers, resumed):
            trainer.close()


@pytest.mark.parametrize(
    ("attention", "experts", "micro_batches", "mode"),
    nightly_except([(1, 1, 1, "plan"), (1, 1, 3, "live"), (2, 2, 2, "plan"), (3, 1, 2, "static")], (1, 1, 1, "plan")),
)
def test_training_is_that_with_a_colocated_rollout(
    folder: Path, attention: int, experts: int, micro_batches: int, mode: str
) -> None:
    on_ranks(train_both, (folder, attention, experts, micro_batches, mode), ranks=attention + experts)


def test_streams_depend_on_the_sequence_alone() -> None:
    config = TrainConfig(out=Path(), samples=3, max_new_tokens=5, seed=4)
    both, one = response_draws(config, 2, [0, 7]), response_draws(config, 2, [7])
    assert both.shape == (6, 5)
    np.testing.assert_array_equal(both[3:], one)
    assert not np.array_equal(one, response_draws(config, 3, [7]))
    assert response_draws(config, 2, []).shape == (0, 5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--algorithm t-ppo", "--rollout disaggregated generates whole responses"),
        ("--attention-ranks 2", "2 attention ranks and 1 expert ranks are 3; together they should be the 2 ranks"),
        ("--micro-batches 9", "--micro-batches is 9, and an attention rank has 8 sequences"),
        (
            "--attention-ranks 3 --ranks 4 --micro-batches 3",
            "--micro-batches is 3, and an attention rank has 2 sequences",
        ),
    ],
)
def test_settings_that_do_not_fit_are_one_line(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["train", "-o", str(tmp_path / "out"), "--problems", "4", "--samples", "2"]
    assert main([*common, "--rollout", "disaggregated", *words.split()]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_sizes_without_a_disaggregated_rollout_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-o", str(tmp_path / "out"), "--micro-batches", "3"]) == 2
    assert "--micro-batches is for --rollout disaggregated" in capsys.readouterr().err


def test_expert_ranks_divide_the_experts() -> None:
    config = TrainConfig(out=Path(), rollout="disaggregated", expert_ranks=3)
    with pytest.raises(InputError, match="3 expert ranks don't divide 8 experts"):
        check_disaggregated(config, small_config("qwen3_moe"), 4)
