"""The task: rewards, held-out problems, tokenizer."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest

from helpers.runs import save_tiny_model
from trimtab.errors import InputError
from trimtab.rl.demo_model import load_tokenizer
from trimtab.rl.task import (
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
)


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
