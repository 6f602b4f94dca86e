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
from trimtab.integrations.transformers import record_routing
from trimtab.rl import windows as windows_module
from trimtab.rl.demo_model import load_config, load_model, load_tokenizer
from trimtab.rl.sequences import Sequence
from trimtab.rl.task import Problem
from trimtab.rl.windows import Windows

PLACES, WINDOW, MOST = 6, 3, 8


def load(folder: Path) -> tuple[Any, Any, Windows]:
    tokenizer = load_tokenizer(folder / "model")
    model = load_model(folder / "model", load_config(folder / "model", tokenizer), torch.float32).eval()
    # Responses end at different lengths.
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)
    return model, tokenizer, Windows(PLACES, window=WINDOW, max_new_tokens=MOST, seed=4)


def check_step(before: list[Sequence], now: list[Sequence], step: int, end: int) -> None:
    """Incomplete responses come first, in order, and have grown; the other places have new prompts."""
    assert len(now) == PLACES
    kept = [sequence for sequence in before if not sequence.is_finished]
    for old, new in zip(kept, now, strict=False):
        known = len(old.token_ids)
        assert np.array_equal(new.token_ids[:known], old.token_ids)
        assert np.array_equal(new.log_probs[: old.response_length], old.log_probs)
        assert np.array_equal(new.expert_ids[: known - 1], old.expert_ids)
        assert new.row_versions is not None
        assert old.row_versions is not None
        assert new.row_versions.tolist() == [*old.row_versions, *[step] * (len(new.token_ids) - known)]
        # Every token is trained once.
        assert new.trained_tokens == old.trained_tokens + old.policy_tokens
        assert 1 <= new.response_length - old.response_length == new.new_tokens <= WINDOW
        # What the rebuilt cache added is what the window recorded.
        assert new.rebuilt_ids is not None
        assert new.rebuilt_ids.shape == new.expert_ids.shape
        assert np.array_equal(new.rebuilt_ids[known - 1 :], new.expert_ids[known - 1 :])
    for new in now[len(kept) :]:
        assert new.row_versions is not None
        assert set(new.row_versions.tolist()) == {step}
        assert new.trained_tokens == 0
        assert new.rebuilt_ids is None
        assert 1 <= new.response_length == new.new_tokens <= WINDOW
    for sequence in now:
        assert len(sequence.expert_ids) == sequence.num_fed
        assert len(sequence.log_probs) == sequence.response_length
        response = sequence.token_ids[sequence.prompt_length :]
        assert len(response) <= MOST
        assert sequence.is_finished == (response[-1] == end or len(response) == MOST)
        assert end not in response[:-1]
        assert sequence.policy_tokens == len(response) - sequence.trained_tokens - (not sequence.is_finished)


@runs_on_ranks()
def test_responses_grow_by_a_window_until_they_are_complete(folder: Path) -> None:
    model, tokenizer, windows = load(folder)
    before: list[Sequence] = []
    complete = []
    for step in range(8):
        now = windows.advance(model, tokenizer, step)
        check_step(before, now, step, tokenizer.eos_token_id)
        complete += [sequence for sequence in now if sequence.is_finished]
        before = now
    assert len({sequence.response_length for sequence in complete}) > 2
    assert any(sequence.response_length > 2 * WINDOW for sequence in complete)
    for sequence in complete:
        if sequence.rebuilt_ids is not None:
            assert np.array_equal(np.sort(sequence.rebuilt_ids, axis=-1), np.sort(sequence.expert_ids, axis=-1))
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
    assert any(s.rebuilt_ids is not None and not np.array_equal(s.rebuilt_ids, s.expert_ids) for s in now)
    first, second = of_all_ranks([response.token_ids.tolist() for response in windows.open])
    assert first != second


@runs_on_ranks()
def test_tokens_are_sampled_anew_in_every_step_and_on_every_rank(folder: Path) -> None:
    """Of the same prompts."""
    model, tokenizer, _ = load(folder)
    with mock.patch.object(windows_module, "draw_problem", return_value=Problem((1, 2))):
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
    state, _ = of_all_ranks(windows.state())

    def opened(windows: Windows) -> list[Any]:
        return [(response.token_ids.tolist(), response.problem) for response in windows.open]

    gathered = of_all_ranks(opened(windows))
    again = load(folder)[2]
    again.load_state(state)
    assert opened(again) == gathered[dist.get_rank()]
    for mine, its in zip(windows.open, again.open, strict=True):
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
