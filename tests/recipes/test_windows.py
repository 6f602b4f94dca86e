"""Windowed rollouts: whole responses from parts, what each part adds, and their state in checkpoints."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from helpers.rank_tests import of_all_ranks, runs_on_ranks
from recipes.rl import t_ppo
from recipes.rl.responses import Response
from recipes.rl.t_ppo import Windows
from recipes.rl.task import SUM, Problem, load_config, load_model, load_tokenizer
from trimtab.integrations.transformers import record_routing

PLACES, WINDOW, MOST = 6, 3, 8


def load(folder: Path) -> tuple[Any, Any, Windows]:
    tokenizer = load_tokenizer(folder / "model", "sums")
    model = load_model(folder / "model", load_config(folder / "model", tokenizer), torch.float32).eval()
    # Responses end at different lengths.
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)
    return model, tokenizer, Windows(PLACES, window=WINDOW, max_new_tokens=MOST, seed=4, operation=SUM)


def check_step(before: list[Response], now: list[Response], step: int, end: int) -> None:
    """Incomplete responses come first, in order, and have grown; the other places have new prompts."""
    assert len(now) == PLACES
    kept = [sequence for sequence in before if not sequence.is_finished]
    for old, new in zip(kept, now, strict=False):
        known = len(old.token_ids)
        assert np.array_equal(new.token_ids[:known], old.token_ids)
        assert np.array_equal(new.log_probs[: old.length], old.log_probs)
        assert np.array_equal(new.expert_ids[: known - 1], old.expert_ids)
        assert new.row_versions is not None
        assert old.row_versions is not None
        assert new.row_versions.tolist() == [*old.row_versions, *[step] * (len(new.token_ids) - known)]
        # Every token is trained once.
        assert new.trained_tokens == old.trained_tokens + old.policy_tokens
        assert 1 <= new.length - old.length == new.new_tokens <= WINDOW
    for new in now[len(kept) :]:
        assert new.row_versions is not None
        assert set(new.row_versions.tolist()) == {step}
        assert new.trained_tokens == 0
        assert 1 <= new.length == new.new_tokens <= WINDOW
    for sequence in now:
        assert len(sequence.expert_ids) == sequence.num_fed
        assert len(sequence.log_probs) == sequence.length
        response = sequence.token_ids[sequence.prompt_length :]
        assert len(response) <= MOST
        assert sequence.is_finished == (response[-1] == end or len(response) == MOST)
        assert end not in response[:-1]
        assert sequence.policy_tokens == len(response) - sequence.trained_tokens - (not sequence.is_finished)


@runs_on_ranks()
def test_responses_grow_by_a_window_until_they_are_complete(folder: Path) -> None:
    model, tokenizer, windows = load(folder)
    before: list[Response] = []
    complete = []
    for step in range(8):
        now = windows.advance(model, tokenizer, step)
        check_step(before, now, step, tokenizer.eos_token_id)
        complete += [sequence for sequence in now if sequence.is_finished]
        before = now
    assert len({sequence.length for sequence in complete}) > 2
    assert any(sequence.length > 2 * WINDOW for sequence in complete)
    # All of it as if the response had been generated at once.
    for sequence in complete:
        tokens = torch.from_numpy(sequence.token_ids)[None]
        with torch.no_grad(), record_routing(model) as record:
            log_probs = model(input_ids=tokens).logits[0].log_softmax(-1)
        assert np.array_equal(
            np.sort(record.expert_ids(tokens)[0], axis=-1), np.sort(sequence.expert_ids.astype(np.int64), axis=-1)
        )
        at = range(sequence.prompt_length, len(sequence.token_ids))
        expected = [float(log_probs[i - 1, sequence.token_ids[i]]) for i in at]
        np.testing.assert_allclose(sequence.log_probs, expected, atol=1e-4)
    # Other weights: what was recorded before stays.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    now = windows.advance(model, tokenizer, 8)
    check_step(before, now, 8, tokenizer.eos_token_id)
    first, second = of_all_ranks([response.token_ids.tolist() for _, response in windows.open])
    assert first != second


@runs_on_ranks()
def test_tokens_are_sampled_anew_in_every_step_and_on_every_rank(folder: Path) -> None:
    """Of the same prompts."""
    model, tokenizer, _ = load(folder)
    with mock.patch.object(t_ppo, "draw_problem", return_value=Problem((1, 2))):
        sampled = [
            [sequence.token_ids.tolist() for sequence in load(folder)[2].advance(model, tokenizer, step)]
            for step in (0, 1, 0)
        ]
    assert sampled[0] == sampled[2]
    assert len({str(tokens) for of_rank in of_all_ranks(sampled[:2]) for tokens in of_rank}) == 4


@runs_on_ranks()
def test_open_responses_continue_on_any_number_of_ranks(folder: Path) -> None:
    model, tokenizer, windows = load(folder)
    windows.advance(model, tokenizer, 0)
    assert windows.open
    state = windows.state()

    def opened(windows: Windows) -> list[Any]:
        return [(response.token_ids.tolist(), problem) for problem, response in windows.open]

    gathered = of_all_ranks(opened(windows))
    again = load(folder)[2]
    again.load_state(state)
    assert opened(again) == gathered[dist.get_rank()]
    for (_, mine), (_, its) in zip(windows.open, again.open, strict=True):
        for name in ("expert_ids", "row_versions", "log_probs", "token_ids"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(its, name), strict=True)
    everything = [*gathered[0], *gathered[1]]
    for ranks in (1, 3):
        dealt = []
        for rank in range(ranks):
            with mock.patch.multiple(dist, get_rank=lambda rank=rank: rank, get_world_size=lambda ranks=ranks: ranks):
                again.load_state(state)
            dealt.append(opened(again))
        assert sorted(chain(*dealt), key=str) == sorted(everything, key=str)
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
