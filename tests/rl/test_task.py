"""The task: rewards, held-out problems, tokenizer."""

from __future__ import annotations

import random

from trimtab.rl.task import Problem, build_tokenizer, draw_demonstration, draw_problem


def test_only_responses_that_end_with_the_right_sum_earn_a_reward() -> None:
    problem = Problem((3, 8, 5))
    assert problem.prompt == "3+8+5="
    for response in (problem.running_sums, "16.", "99,16."):
        assert problem.reward(response) == 1.0
    for response in ("16", "11,17.", "~20.", "", "16,.", problem.estimate):
        assert problem.reward(response) == 0.0


def test_estimates_are_never_right() -> None:
    rng = random.Random(0)
    for _ in range(500):
        problem = draw_problem(rng, held_out=False)
        assert problem.reward(problem.estimate) == 0.0
        assert problem.reward(problem.running_sums) == 1.0


def test_held_out_problems_are_never_trained_on() -> None:
    rng = random.Random(0)
    held_out = {draw_problem(rng, held_out=True).prompt for _ in range(300)}
    trained = {draw_demonstration(rng)[0].prompt for _ in range(3000)}
    trained |= {draw_problem(rng, held_out=False).prompt for _ in range(3000)}
    assert not held_out & trained


def test_the_tokenizer_has_one_token_per_character_and_round_trips() -> None:
    tokenizer = build_tokenizer()
    text = "3+8+5=11,16."
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert len(set(ids)) == len(set(text))
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.pad_token_id not in ids
