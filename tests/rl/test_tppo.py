"""T-PPO on two ranks: gradients of a plain single-process T-PPO, equal losses, resume in the middle of a response."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import torch

from helpers.examples import nightly_except
from helpers.live_runs import quotas_of_few
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from helpers.trainers import (
    LOG_RATIO,
    PlainValues,
    assert_equal_states,
    compare_gradients,
    discounted,
    make_sequences,
    plain_response,
    plan_and_recompute,
    save_and_resume,
    start,
    start_for_gradients,
    strengthen_experts,
)
from trimtab.rl.algorithm import TokenOutputs, TrainedTokens
from trimtab.rl.batches import collate
from trimtab.rl.config import PrefixRouting, ValueModelName
from trimtab.rl.sequences import Sequence
from trimtab.rl.step_metrics import StepClock
from trimtab.rl.tppo import TPPO
from trimtab.rl.value_head import ValueHead
from trimtab.rl.windows import Windows
from trimtab.runtime.live import balancer
from trimtab.runtime.session_settings import Mode
from trimtab.trace import read_trace


def partly_trained(count: int) -> list[Sequence]:
    """Complete and incomplete sequences, some of which were trained on in parts."""
    rng = np.random.default_rng(6)
    found = []
    for index, sequence in enumerate(make_sequences(count, hot=True)):
        known = int(rng.integers(0, sequence.response_length))
        # The last known token was not trained.
        versions = np.where(np.arange(sequence.num_fed) < sequence.prompt_length - 1 + known, 3 - index % 3, 4)
        is_finished = index % 3 > 0
        found.append(replace(
            sequence, reward=float(rng.random()) if is_finished else 0.0, is_finished=is_finished,
            trained_tokens=max(0, known - 1), row_versions=versions.astype(np.int32),
            log_probs=-3 + rng.random(sequence.response_length).astype(np.float32),
        ))  # fmt: skip
    return [sequence for sequence in found if sequence.policy_tokens or sequence.value_tokens]


def plain_loss(model: Any, value_model: PlainValues, sequences: list[Sequence]) -> torch.Tensor:
    """The loss of T-PPO, from its definition, of a whole model that routes by itself."""
    policy, value = torch.zeros(()), torch.zeros(())
    policy_tokens = value_tokens = 0
    for sequence in sequences:
        length, (log_probs, values) = sequence.response_length, plain_response(model, value_model, sequence)
        after = [*values.tolist()[1:], sequence.reward if sequence.is_finished else float(values[-1])]
        deltas = np.array(after) - values.tolist()
        assert sequence.row_versions is not None
        versions = sequence.row_versions[sequence.prompt_length - 1 :]
        for t in range(sequence.trained_tokens, length if sequence.is_finished else length - 1):
            is_new = versions[t] == versions[-1]
            old = log_probs[t].detach() - LOG_RATIO if is_new else torch.tensor(sequence.log_probs[t])
            ratio = (log_probs[t] - old).exp()
            advantage = discounted(deltas[t:])
            policy = policy - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            policy_tokens += 1
        if sequence.is_finished:
            # Nothing is clipped when the values have not changed.
            value = value + 0.5 * ((values - sequence.reward) ** 2).sum()
            value_tokens += length
    return policy / policy_tokens + value / value_tokens


@pytest.mark.parametrize("value_model", get_args(ValueModelName))
@pytest.mark.parametrize("mode", ["plan", "off"])
@runs_on_ranks()
def test_gradients_equal_those_of_a_plain_tppo(folder: Path, mode: Mode, value_model: ValueModelName) -> None:
    trainer, model = start_for_gradients(folder, "t-ppo", mode, value_model)
    windows = Windows(8, window=3, max_new_tokens=8, seed=2)
    of_rank_0, _ = of_all_ranks([s for step in range(3) for s in windows.advance(model, trainer.tokenizer, step)])
    rng = np.random.default_rng(8)
    sequences = [replace(s, reward=float(rng.random())) if s.is_finished else s for s in of_rank_0]
    # Windows whose policy differs from that of now.
    sequences = [replace(s, log_probs=s.log_probs - rng.normal(size=s.response_length) * 0.1) for s in sequences]
    assert any(s.is_finished and s.trained_tokens for s in sequences)
    assert any(not s.is_finished and s.trained_tokens for s in sequences)
    compare_gradients(trainer, model, sequences, plain_loss)
    trainer.close()


@runs_on_ranks()
def test_tokens_that_are_fed_and_trained_are_counted(folder: Path) -> None:
    trainer, sequences = start(folder, algorithm="t-ppo"), partly_trained(16)
    _, metrics = trainer.train(sequences[trainer.rank :: 2], 0, StepClock())
    assert metrics["tokens/computed"] == sum(len(s.expert_ids) for s in sequences)
    trained = [s.response_length - s.trained_tokens - (not s.is_finished) for s in sequences]
    assert metrics["tokens/trained"] == sum(trained)
    trainer.close()


def test_figures_by_age_are_of_the_policy_before_the_step() -> None:
    batch = collate(partly_trained(16), pad_token_id=0, device=torch.device("cpu"))
    drift = torch.tensor([0.01, 0.5, -0.1])[batch.ages.clamp(max=2)]
    old_log_probs = (batch.rollout_log_probs + drift) * batch.response_mask
    value_model = ValueHead(4, 0, torch.device("cpu"))
    tppo = TPPO(value_model, Windows(1, window=2, max_new_tokens=4, seed=0))
    outputs = TokenOutputs(old_log_probs * batch.policy_mask, torch.zeros(*batch.targets.shape, 4))
    batch = tppo.with_targets(batch, outputs)
    found = tppo.metrics(tppo.loss(batch, outputs, old_log_probs, TrainedTokens(1, 1)).sums)
    for age, shift in (("0", 0.01), ("1", 0.5), ("2_or_more", -0.1)):
        assert found[f"ppo/kl_age_{age}"] == pytest.approx(np.exp(shift) - 1 - shift, rel=1e-3)
        assert found[f"ppo/clip_fraction_age_{age}"] == (age == "1")


@runs_on_ranks()
def test_recorded_prefixes_differ_from_the_rebuilt_cache(folder: Path) -> None:
    """The weights change in the middle of responses."""
    trainer = start(folder, algorithm="t-ppo", window=2, max_new_tokens=8, problems=12)
    generator = torch.Generator().manual_seed(3)
    strengthen_experts(trainer)
    trainer.sync_rollout()
    trainer.rollout(0)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "gate.weight" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 2)
    trainer.sync_rollout()
    old = [sequence for sequence in trainer.rollout(1) if sequence.rebuilt_ids is not None]
    found = {}
    for routing in get_args(PrefixRouting):
        trainer.config = replace(trainer.config, prefix_routing=routing)
        prepared, log_probs = plan_and_recompute(trainer, old, 1)
        found[routing] = trainer.rollout_difference(prepared, log_probs)
        unknown = (prepared.trace.expert_ids == prepared.trace.no_route).all(axis=(1, 2))
        versions = np.concatenate([prepared.trace.row_versions(s) for s in range(prepared.trace.num_sequences)])
        assert unknown.tolist() == ((versions == 0) & (routing == "live")).tolist()
        assert {len(windows) for windows in prepared.trace.windows} == {2}
    trainer.close()
    assert 0 < found["rebuilt"] < 0.1
    assert found["live"] < found["recorded"] / 2
    assert found["rebuilt"] < found["recorded"] / 2


@runs_on_ranks()
def test_only_tokens_of_a_loss_have_logits(folder: Path) -> None:
    trainer = start(folder, algorithm="t-ppo", mode="off")
    head = trainer.model.get_output_embeddings()
    rows: list[int] = []
    hook = head.register_forward_hook(lambda _module, args, _output: rows.append(len(args[0])))
    sequences = partly_trained(16)
    prepared, old_log_probs = plan_and_recompute(trainer, sequences[trainer.rank :: 2])
    recomputed, updates = sum(rows), len(rows)
    trainer.update(prepared, old_log_probs, 0)
    hook.remove()
    totals = of_all_ranks((recomputed, sum(rows[updates:])))
    assert sum(total for total, _ in totals) == sum(sequence.response_length for sequence in sequences)
    assert sum(total for _, total in totals) == sum(sequence.policy_tokens for sequence in sequences)
    trainer.close()


@pytest.mark.parametrize("value_model", nightly_except(get_args(ValueModelName), "trunk"))
@runs_on_ranks()
def test_a_run_resumes_in_the_middle_of_responses_bit_for_bit(folder: Path, value_model: ValueModelName) -> None:
    settings: dict[str, Any] = {"window": 2, "max_new_tokens": 7, "learning_rate": 1e-3, "value_model": value_model}
    trainer = start(folder, algorithm="t-ppo", slots=2 if value_model == "trunk" else 0, **settings)
    (folder / "out" / "routing").mkdir(exist_ok=True)
    windows: Any = trainer.algorithm.windows
    for step in range(2):
        trainer.step(step)
    again = save_and_resume(trainer, 2)
    again.session.settings = replace(again.session.settings, least_gain=trainer.session.settings.least_gain)
    trace = read_trace(folder / "out" / "routing" / "step-00001.parquet")
    assert {len(windows) for windows in trace.windows} == {0, 2}
    # In the middle of responses.
    assert any(len(set(response.row_versions.tolist())) == 2 for response in windows.open)
    for step in (2, 3):
        with mock.patch.object(balancer, "choose_quotas", quotas_of_few):
            straight, resumed = (
                {name: value for name, value in each.step(step).items() if not name.endswith(("_s", "_bytes"))}
                for each in (trainer, again)
            )
        assert straight == resumed
        assert value_model == "head" or straight["value/replicas"] > 0
    assert_equal_states(*(each.algorithm_state() for each in (trainer, again)))
    assert_equal_states(*(each.session.logical_state_dict(each.model) for each in (trainer, again)))
    for each in (trainer, again):
        each.close()
