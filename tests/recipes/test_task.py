"""The task, and what is made of it: rewards, tokenizer, sampled responses, micro-batches, warm start."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from helpers.rank_tests import runs_on_ranks
from helpers.runs import save_tiny_model
from helpers.trainers import LAYERS, TOP_K, start
from recipes.rl import train
from recipes.rl.batches import TrainedTokens, collate, policy_loss, token_log_probs
from recipes.rl.responses import Response, response_draws, sample_groups
from recipes.rl.task import (
    COUNT,
    ESTIMATE_SHARES,
    OPERATIONS,
    SHARES,
    SUM,
    TASKS,
    Problem,
    build_tokenizer,
    draw_demonstration,
    draw_problem,
    load_config,
    load_model,
    load_tokenizer,
)
from recipes.rl.train import load_balancing_loss
from trimtab.errors import InputError
from trimtab.runtime import Session

PROBLEMS = [Problem((1, 2)), Problem((3, 4, 5)), Problem((9, 9, 9, 9))]


def test_only_responses_that_end_with_the_right_sum_earn_a_reward() -> None:
    problem = Problem((3, 8, 5))
    assert problem.prompt == "3+8+5="
    assert problem.response == "11,16."
    for response in (problem.response, "16.", "99,16."):
        assert problem.reward(response) == 1.0
    for response in ("16", "11,17.", "~20.", "", "16,.", problem.estimate):
        assert problem.reward(response) == 0.0
    rng = random.Random(0)
    for problem in (draw_problem(rng, held_out=False) for _ in range(500)):
        assert problem.operation == SUM
        assert (problem.reward(problem.response), problem.reward(problem.estimate)) == (1.0, 0.0)


def test_held_out_problems_are_never_trained_on() -> None:
    rng = random.Random(0)
    held_out = {draw_problem(rng, held_out=True).prompt for _ in range(300)}
    trained = {draw_demonstration(rng)[0].prompt for _ in range(3000)}
    trained |= {draw_problem(rng, held_out=False).prompt for _ in range(3000)}
    assert not held_out & trained
    # One in eight, by its text: later versions don't train on what earlier ones held out.
    assert all((zlib.crc32(prompt.encode()) % 8 == 0) == (prompt in held_out) for prompt in held_out | trained)


def test_demonstrations_of_all_operations_are_right() -> None:
    rng = random.Random(0)
    shown = [draw_demonstration(rng) for _ in range(4000)]
    terms = (3, 0, 2)
    expected = {"+": ("3+0+2=", "3,5."), "<": ("d<a<c=", "acd."), ">": ("d>a>c=", "ebd."), "|": ("d|a|c=", "cad."),
                "^": ("d^a^c=", "ddd.")}  # fmt: skip
    assert {p.operation for p, _ in shown} == set(OPERATIONS) - {COUNT} == set(expected)
    for operation, (prompt, response) in expected.items():
        problem = Problem(terms, operation)
        assert (problem.prompt, problem.response) == (prompt, response)
        assert problem.reward(response) == 1.0
    sums = [(problem, response) for problem, response in shown if problem.operation == SUM]
    assert len(sums) / len(shown) == pytest.approx(SHARES[SUM], abs=0.03)
    estimates = [response == problem.estimate for problem, response in sums]
    assert sum(estimates) / len(sums) == pytest.approx(0.5, abs=0.06)
    assert all(response == problem.response for problem, response in shown if problem.operation != SUM)


def test_counting_has_long_and_uneven_responses() -> None:
    rng = random.Random(0)
    problem = Problem((6, 1, 4), COUNT)
    assert (problem.prompt, problem.response, problem.estimate) == ("gb:4=", "3,2,1,0.", "~0.")
    for response in ("3,2,1,0", "2,1,0.", "0.", problem.estimate, ""):
        assert problem.reward(response) == 0.0
    problems = [draw_problem(rng, held_out=False, operation=COUNT) for _ in range(2000)]
    for problem in problems:
        assert (problem.reward(problem.response), problem.reward(problem.estimate)) == (1.0, 0.0)
    lengths = sorted(len(problem.response) for problem in problems)
    assert 85 < lengths[-1] < 100
    assert lengths[-1] > 4 * lengths[len(lengths) // 2]
    shown = [draw_demonstration(rng, COUNT) for _ in range(2000)]
    assert {p.operation for p, _ in shown} == set(OPERATIONS) - {SUM}
    mine = [response == problem.estimate for problem, response in shown if problem.operation == COUNT]
    assert len(mine) / len(shown) == pytest.approx(SHARES[COUNT], abs=0.03)
    assert sum(mine) / len(mine) == pytest.approx(ESTIMATE_SHARES[COUNT], abs=0.03)


@pytest.mark.parametrize("task", [SUM, COUNT])
def test_the_tokenizer_has_one_token_per_character_and_round_trips(task: str) -> None:
    tokenizer = build_tokenizer(task)
    operations = [operation for operation in OPERATIONS if operation == task or operation not in TASKS.values()]
    problems = [Problem((3, 8, 5), operation) for operation in operations]
    for text in (problem.prompt + problem.response for problem in problems):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert len(set(ids)) == len(set(text))
        assert tokenizer.decode(ids) == text
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.pad_token_id not in ids


def test_a_checkpoint_that_can_not_write_the_task_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    assert load_tokenizer(tmp_path, "sums").eos_token == "."
    with pytest.raises(InputError, match=r"no token for ':', which --task counting needs"):
        load_tokenizer(tmp_path, "counting")


def test_sampled_responses_have_their_log_probs_rewards_and_advantages(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_tiny_model(tmp_path)
    tokenizer = load_tokenizer(tmp_path, "sums")
    model: Any = load_model(tmp_path, load_config(tmp_path, tokenizer), torch.float32).eval()
    texts: list[str] = []
    counted: list[Any] = []

    def reward(_problem: Problem, response: str) -> float:
        texts.append(response)
        return float(len(response))

    with mock.patch.object(Problem, "reward", reward):
        draws = response_draws(0, 0, range(3), samples=8, new_tokens=12)
        responses = sample_groups(model, tokenizer, PROBLEMS, draws, counted.append)
    assert len(responses) == 24
    lengths = {r.length for r in responses}
    assert min(lengths) < 12 == max(lengths)
    # Those that ended first were counted once.
    (ended,) = counted
    assert ended.num_sequences < 24
    for index, (response, text) in enumerate(zip(responses, texts, strict=True)):
        tokens, prompt = response.token_ids, response.prompt_length
        assert tokenizer.decode(tokens[:prompt]) == PROBLEMS[index // 8].prompt
        assert tokenizer.decode(tokens[prompt:]) == text
        # Up to the end token, which is the last if the response has one.
        ends = np.flatnonzero(tokens[prompt:] == tokenizer.eos_token_id).tolist()
        assert ends == [response.length - 1] if response.length < 12 else ends in ([], [11])
        assert response.expert_ids.shape == (len(tokens) - 1, 2, 2)
        with torch.no_grad():
            log_probs = model(input_ids=torch.from_numpy(tokens[None])).logits[0].log_softmax(-1)
        expected = [float(log_probs[at - 1, tokens[at]]) for at in range(prompt, len(tokens))]
        np.testing.assert_allclose(response.log_probs, expected, atol=1e-4)
        mean = sum(map(len, texts[index // 8 * 8 : index // 8 * 8 + 8])) / 8
        assert response.advantage == pytest.approx(len(text) - mean)


def test_streams_depend_on_the_response_alone() -> None:
    both, one = (response_draws(4, 2, problems, samples=3, new_tokens=5) for problems in ([0, 7], [7]))
    assert both.shape == (6, 5)
    np.testing.assert_array_equal(both[3:], one)
    assert not np.array_equal(one, response_draws(4, 3, [7], 3, 5))
    assert response_draws(4, 2, [], 3, 5).shape == (0, 5)


def test_micro_batches_mark_responses_and_positions() -> None:
    def response(tokens: list[int], prompt: int, advantage: float) -> Response:
        log_probs = -np.array(tokens[prompt:], np.float32)
        return Response(np.array(tokens), prompt, np.zeros((len(tokens) - 1, 1, 1)), log_probs, advantage=advantage)

    responses = [response([1, 2, 3, 4], 2, 0.5), response([5, 6], 1, -2.0)]
    batch = collate(responses, pad_token_id=0, device=torch.device("cpu"))
    assert batch.input_ids.tolist() == [[1, 2, 3], [5, 6, 0]]
    assert batch.targets.tolist() == [[2, 3, 4], [6, 0, 0]]
    assert batch.response_mask.tolist() == [[0, 1, 1], [1, 0, 0]]
    # The log-probability of each token here is minus its id.
    assert batch.rollout_log_probs.tolist() == [[0, -3, -4], [-6, 0, 0]]
    assert batch.positions.tolist() == [0, 1, 2, 3]
    # Ratios 2 and 0.9 of the first response, 0.5 of the second.
    log_ratio = torch.tensor([[1.0, 2.0, 0.9], [0.5, 1.0, 1.0]]).log()
    loss, figures = policy_loss(log_ratio, batch, TrainedTokens(3, 0))
    assert float(loss) == pytest.approx(-(0.5 * (1.2 + 0.9) - 2 * 0.8) / 3)
    assert figures == {"ppo/clip_fraction": (2, 3)}
    empty = collate([], pad_token_id=0, device=torch.device("cpu"))
    assert empty.input_ids.shape == (1, 1)
    assert empty.positions.tolist() == []
    assert empty.response_mask.sum() == 0
    logits, targets = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    assert torch.allclose(
        token_log_probs(logits, targets), logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]
    )


def test_the_loss_equals_that_of_transformers_for_one_layer() -> None:
    logits = torch.randn(40, 8)
    expected = load_balancing_loss_func((logits,), 8, 2)
    assert float(load_balancing_loss(logits, logits.topk(2).indices)) == pytest.approx(float(expected) / 2, rel=1e-5)


@runs_on_ranks()
def test_padding_does_not_count_in_the_load_balancing_loss(folder: Path) -> None:
    shapes, values = list[tuple[int, ...]](), list[float]()

    def kept_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        value = load_balancing_loss(logits, ids)
        shapes.append((len(micro_step.call_args.kwargs["positions"]), *ids.shape))
        values.append(float(value.detach()))
        return value

    with (
        mock.patch.object(train, "BALANCE_WEIGHT", 10.0),
        mock.patch.object(train, "load_balancing_loss", kept_loss),
        mock.patch.object(Session, "live_micro_step", autospec=True, side_effect=Session.live_micro_step) as micro_step,
    ):
        start(folder, warm_start_steps=12).close()
    assert len(shapes) == 12 * LAYERS
    assert all((rows, top_k) == (fed, TOP_K) for fed, rows, top_k in shapes)
    assert LAYERS < sum(values[-LAYERS:]) < sum(values[:LAYERS]) - 0.02
