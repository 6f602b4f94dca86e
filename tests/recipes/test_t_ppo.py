"""PPO and T-PPO on two ranks: advantages, gradients of a plain process, equal losses, resume in mid-response."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from helpers.examples import nightly_except
from helpers.random_choices import quotas_of_few
from helpers.rank_pool import on_ranks
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from helpers.runs import assert_equal
from helpers.trainers import (
    LOG_RATIO,
    PlainValues,
    compare_gradients,
    discounted,
    make_responses,
    plain_response,
    plan_and_recompute,
    randomize,
    save_and_resume,
    start,
    start_for_gradients,
)
from recipes.rl.batches import Outputs, TrainedTokens, collate
from recipes.rl.config import VALUE_MODELS
from recipes.rl.responses import Response, response_draws, sample_groups
from recipes.rl.t_ppo import (
    MAX_NORM,
    PPO,
    VALUE_CLIP,
    ValueHead,
    ValueTrunk,
    Windows,
    clipped_value_loss,
    extended_advantages,
    generalized_advantages,
)
from recipes.rl.task import SUM, draw_problem
from recipes.rl.train import Trainer
from trimtab.array_type import Array
from trimtab.runtime.live import balancer
from trimtab.runtime.session_settings import Mode
from trimtab.trace import read_trace

Row = tuple[int, list[float], float]
# Libraries may have switched subnormal numbers off in this process.
VALUES, LAMBDAS = st.floats(-2, 2, allow_subnormal=False), st.floats(0, 1, allow_subnormal=False)


def brute_force(differences: Array, gae_lambda: float) -> Array:
    """The sum of lambda^(k - t) * delta_k over k >= t, for every t."""
    length = len(differences)
    return np.array([sum(gae_lambda ** (k - t) * differences[k] for k in range(t, length)) for t in range(length)])


@st.composite
def responses(draw: st.DrawFn) -> list[Row]:
    """Rows of a micro-batch: prompt tokens, values of the response's states, reward."""
    return [
        (draw(st.integers(0, 3)), draw(st.lists(VALUES, min_size=1, max_size=8)), draw(VALUES))
        for _ in range(draw(st.integers(1, 3)))
    ]


def padded(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, rewards and mask of rows. Values outside of responses are not a number."""
    width = max(prompt + len(values) for prompt, values, _ in rows)
    values_BT = torch.full((len(rows), width), torch.nan, dtype=torch.float64)
    mask_BT = torch.zeros(len(rows), width)
    for row, (prompt, values, _) in enumerate(rows):
        values_BT[row, prompt : prompt + len(values)] = torch.tensor(values, dtype=torch.float64)
        mask_BT[row, prompt : prompt + len(values)] = 1
    return values_BT, torch.tensor([row[2] for row in rows], dtype=torch.float64), mask_BT


@given(responses(), LAMBDAS, st.lists(st.booleans(), min_size=3, max_size=3))
@example([(1, [0.5], 1.0), (0, [0.1, 0.7, 0.2], 1.0)], 0.9, [False, False, False])
def test_advantages_equal_their_definition(rows: list[Row], gae_lambda: float, finished: list[bool]) -> None:
    """GAE, and extended GAE of finished and incomplete responses, whose rewards are not a number."""
    values_BT, rewards_B, mask_BT = padded(rows)
    finished_B = torch.tensor(finished[: len(rows)])
    of_finished = generalized_advantages(values_BT, rewards_B, mask_BT, gae_lambda)
    rewards_B[~finished_B] = torch.nan
    extended = extended_advantages(values_BT, rewards_B, finished_B, mask_BT, gae_lambda)
    for row, (prompt, values, reward) in enumerate(rows):
        complete, incomplete = np.diff([*values, reward]), np.array([*np.diff(values), 0.0])
        for found, differences in ((of_finished, complete), (extended, complete if finished[row] else incomplete)):
            actual, expected = found[row, prompt : prompt + len(values)].numpy(), brute_force(differences, gae_lambda)
            np.testing.assert_allclose(actual, expected, atol=1e-12, rtol=0)
        if not finished[row]:
            assert extended[row, prompt + len(values) - 1] == 0
    assert (of_finished[mask_BT == 0] == 0).all()
    assert (extended[mask_BT == 0] == 0).all()


def test_the_value_loss_equals_its_definition() -> None:
    old, returns = torch.zeros(1, 5), torch.tensor([[1.0, 1.0, -1.0, 1.0, 0.1]])
    values = torch.tensor([[0.1, 0.5, 0.5, -0.5, 0.5]])
    # Clipped at 0.2: a value that has moved further has no gradient, unless it moved away from the return.
    expected = [0.9**2, 0.8**2, 1.5**2, 1.5**2, 0.4**2]
    assert VALUE_CLIP == 0.2
    for shift in (0.0, 0.3):
        found = clipped_value_loss(values + shift, old + shift, returns + shift)
        assert found.tolist()[0] == pytest.approx([x / 2 for x in expected])


def with_rewards(sequences: list[Response]) -> list[Response]:
    rng = np.random.default_rng(8)
    return [replace(sequence, reward=float(rng.random())) for sequence in sequences]


def ppo_loss(model: Any, value_model: PlainValues, sequences: list[Response]) -> torch.Tensor:
    """The loss of PPO, from its definition, of a whole model that routes by itself."""
    loss = torch.zeros(())
    for sequence in sequences:
        log_probs, values = plain_response(model, value_model, sequence)
        deltas = np.diff([*values.tolist(), sequence.reward])
        advantages = torch.tensor([discounted(deltas[t:]) for t in range(len(deltas))], dtype=torch.float32)
        ratio = (log_probs - log_probs.detach() + LOG_RATIO).exp()
        loss = loss - torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
        loss = loss + 0.5 * ((values - (values.detach() + advantages)) ** 2).sum()
    return loss / sum(sequence.length for sequence in sequences)


def partly_trained(count: int) -> list[Response]:
    """Complete and incomplete sequences, some of which were trained on in parts."""
    rng = np.random.default_rng(6)
    found = []
    for index, sequence in enumerate(make_responses(count, hot=True)):
        known = int(rng.integers(0, sequence.length))
        # The last known token was not trained.
        versions = np.where(np.arange(sequence.num_fed) < sequence.prompt_length - 1 + known, 3 - index % 3, 4)
        is_finished = index % 3 > 0
        found.append(replace(
            sequence, reward=float(rng.random()) if is_finished else 0.0, is_finished=is_finished,
            known_tokens=known, row_versions=versions.astype(np.int32),
            log_probs=-3 + rng.random(sequence.length).astype(np.float32),
        ))  # fmt: skip
    return [sequence for sequence in found if sequence.policy_tokens or sequence.value_tokens]


def t_ppo_loss(model: Any, value_model: PlainValues, sequences: list[Response]) -> torch.Tensor:
    """The loss of T-PPO, from its definition, of a whole model that routes by itself."""
    policy, value = torch.zeros(()), torch.zeros(())
    policy_tokens = value_tokens = 0
    for sequence in sequences:
        length, (log_probs, values) = sequence.length, plain_response(model, value_model, sequence)
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


GRADIENTS = product(("ppo", "t-ppo"), ("plan", "off"), VALUE_MODELS)


@pytest.mark.parametrize(
    ("algorithm", "mode", "value_model"),
    nightly_except(GRADIENTS, ("ppo", "plan", "head"), ("t-ppo", "plan", "trunk")),
)
@runs_on_ranks()
def test_gradients_equal_those_of_a_plain_process(folder: Path, algorithm: str, mode: Mode, value_model: str) -> None:
    trainer, model = start_for_gradients(folder, algorithm, mode, value_model)
    rng = np.random.default_rng(8)
    if algorithm == "ppo":
        problems = [draw_problem(random.Random(problem), held_out=False) for problem in range(6)]
        responses = with_rewards(
            sample_groups(model, trainer.tokenizer, problems, response_draws(1, 0, range(6), 2, 6))
        )
    else:
        windows = Windows(8, window=3, max_new_tokens=8, seed=2, operation=SUM)
        of_rank_0, _ = of_all_ranks([r for step in range(3) for r in windows.advance(model, trainer.tokenizer, step)])
        responses = [replace(r, reward=float(rng.random())) if r.is_finished else r for r in of_rank_0]
        # Windows whose policy differs from that of now.
        responses = [replace(r, log_probs=r.log_probs - rng.normal(size=r.length) * 0.1) for r in responses]
        assert any(r.is_finished and r.trained_tokens for r in responses)
        assert any(not r.is_finished and r.trained_tokens for r in responses)
    compare_gradients(trainer, model, responses, ppo_loss if algorithm == "ppo" else t_ppo_loss)
    trainer.close()


@runs_on_ranks()
def test_tokens_that_are_fed_and_trained_are_counted(folder: Path) -> None:
    trainer, sequences = start(folder, algorithm="t-ppo"), partly_trained(16)
    _, metrics = trainer.train(sequences[trainer.rank :: 2], 0)
    assert metrics["tokens/computed"] == sum(len(s.expert_ids) for s in sequences)
    trained = [s.length - s.trained_tokens - (not s.is_finished) for s in sequences]
    assert metrics["tokens/trained"] == sum(trained)
    trainer.close()


def test_figures_by_age_are_of_the_policy_before_the_step() -> None:
    batch = collate(partly_trained(16), pad_token_id=0, device=torch.device("cpu"))
    drift = torch.tensor([0.01, 0.5, -0.1])[batch.ages.clamp(max=2)]
    old_log_probs = (batch.rollout_log_probs + drift) * batch.response_mask
    session: Any = None
    windows = Windows(1, window=2, max_new_tokens=4, seed=0, operation=SUM)
    tppo = PPO(ValueHead(4, 0, session, torch.device("cpu")), windows)
    outputs = Outputs(old_log_probs * batch.policy_mask, torch.zeros(*batch.targets.shape, 4))
    batch = tppo.with_targets(batch, outputs)
    _, figures = tppo.loss(batch, outputs, old_log_probs, TrainedTokens(1, 1))
    found = {name: total / tokens for name, (total, tokens) in figures.items()}
    for age, shift in (("0", 0.01), ("1", 0.5), ("2_or_more", -0.1)):
        assert found[f"ppo/kl_age_{age}"] == pytest.approx(np.exp(shift) - 1 - shift, rel=1e-3)
        assert found[f"ppo/clip_fraction_age_{age}"] == (age == "1")


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
    assert sum(total for total, _ in totals) == sum(sequence.length for sequence in sequences)
    assert sum(total for _, total in totals) == sum(sequence.policy_tokens for sequence in sequences)
    trainer.close()


@pytest.mark.parametrize("value_model", nightly_except(VALUE_MODELS, "trunk"))
@runs_on_ranks()
def test_a_run_resumes_in_the_middle_of_responses_bit_for_bit(folder: Path, value_model: str) -> None:
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
    assert any(len(set(response.row_versions.tolist())) == 2 for _, response in windows.open)
    for step in (2, 3):
        with mock.patch.object(balancer, "choose_quotas", quotas_of_few):
            straight, resumed = (
                {name: value for name, value in each.step(step).items() if not name.endswith(("_s", "_bytes"))}
                for each in (trainer, again)
            )
        assert straight == resumed
        assert value_model == "head" or straight["value/replicas"] > 0
    states = [{name: part.state() for name, part in each._stateful.items()} for each in (trainer, again)]
    assert_equal(states[0], states[1])
    weights = [each.session.whole_state_dict(each.model) for each in (trainer, again)]
    assert_equal(weights[0], weights[1])
    for each in (trainer, again):
        each.close()


def start_trunk(folder: Path, **settings: Any) -> tuple[Trainer, ValueTrunk]:
    trainer = start(folder, value_model="trunk", **settings)
    trunk = trainer.algorithm.value_model
    assert isinstance(trunk, ValueTrunk)
    return trainer, trunk


def some_finished(count: int = 14) -> list[Response]:
    rng = np.random.default_rng(4)
    return [
        replace(sequence, is_finished=index % 3 == 0, reward=float(rng.random()))
        for index, sequence in enumerate(make_responses(count))
    ]


def count_sequences(trunk: ValueTrunk) -> list[int]:
    """Those that it is fed from now on, a number for each forward."""
    fed: list[int] = []
    trunk.network["trunk"].register_forward_pre_hook(
        lambda _module, _args, given: fed.append(len(given["input_ids"])), with_kwargs=True
    )
    return fed


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


@pytest.mark.parametrize("value_model", VALUE_MODELS)
@runs_on_ranks()
def test_gradients_are_clipped_by_the_norm_of_all_ranks(folder: Path, value_model: str) -> None:
    trainer = start(folder, algorithm="ppo", value_model=value_model)
    model = trainer.algorithm.value_model
    assert model is not None
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


def train_some_steps(folder: Path, mode: Mode, algorithm: str, value_model: str) -> list[dict[str, float]]:
    settings: dict[str, Any] = {"slots": 2, "token_budget": 512} if value_model == "trunk" else {}
    trainer = start(folder, algorithm=algorithm, mode=mode, value_model=value_model, learning_rate=1e-3, **settings)
    found = []
    for step in range(3):
        # With a trunk, enough rows that a replica has work.
        sequences = some_finished(160 if value_model == "trunk" else 14)
        _, metrics = trainer.train(sequences[trainer.rank :: 2], step)
        assert (metrics["moe/unplanned_micro_steps"] > 0) == (mode == "off")
        assert value_model == "head" or (metrics["value/replicas"] > 0) == (mode == "plan")
        names = ("loss", "grad_norm", "ppo/", "value/loss", "value/mean")
        found.append({name: metrics[name] for name in metrics if name.startswith(names)})
    trainer.close()
    return found


@pytest.mark.parametrize(
    ("algorithm", "value_model"),
    nightly_except(product(["ppo", "t-ppo"], VALUE_MODELS), ("ppo", "head"), ("t-ppo", "trunk")),
)
def test_balanced_and_unbalanced_runs_have_the_same_losses(folder: Path, algorithm: str, value_model: str) -> None:
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
    assert trainer.train([], 0)[1]["loss"] == 0
    prepared, metrics = trainer.train(some_finished()[:1] if trainer.rank == 0 else [], 1)
    assert prepared.schedule.num_micro_steps == 1
    trainer.close()
    return {name: metrics[name] for name in ("loss", "value/loss")}


def test_mini_batches_may_be_empty(folder: Path) -> None:
    head, trunk = (on_ranks(train_one, (folder, value_model), ranks=2)[0] for value_model in VALUE_MODELS)
    # First values are 0.
    assert head == pytest.approx(trunk)
    assert head["value/loss"] > 0
