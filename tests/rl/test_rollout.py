"""Rollouts: recorded log-probabilities, advantages, ends of responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from helpers.runs import save_tiny_model
from trimtab.rl.demo_model import load_config, load_model, load_tokenizer
from trimtab.rl.rollout import sample_groups
from trimtab.rl.task import Problem

PROBLEMS = [Problem((1, 2)), Problem((3, 4, 5)), Problem((9, 9, 9, 9))]


def test_sampled_responses_have_their_log_probs_rewards_and_advantages(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_tiny_model(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    model: Any = load_model(tmp_path, load_config(tmp_path, tokenizer), torch.float32).eval()
    responses: list[str] = []

    def reward(_problem: Problem, response: str) -> float:
        responses.append(response)
        return float(len(response))

    with mock.patch.object(Problem, "reward", reward):
        sequences = sample_groups(model, tokenizer, PROBLEMS, samples=8, max_new_tokens=12)
    assert len(sequences) == 24
    lengths = {s.response_length for s in sequences}
    assert min(lengths) < 12 == max(lengths)
    for index, (sequence, response) in enumerate(zip(sequences, responses, strict=True)):
        tokens, prompt = sequence.token_ids, sequence.prompt_length
        assert tokenizer.decode(tokens[:prompt]) == PROBLEMS[index // 8].prompt
        assert tokenizer.decode(tokens[prompt:]) == response
        # Up to the end token, which is the last if the response has one.
        ends = np.flatnonzero(tokens[prompt:] == tokenizer.eos_token_id).tolist()
        assert ends == [sequence.response_length - 1] if sequence.response_length < 12 else ends in ([], [11])
        assert sequence.expert_ids.shape == (len(tokens) - 1, 2, 2)
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(tokens[None])).logits[0]
        log_probs = logits.log_softmax(-1)
        expected = [float(log_probs[at - 1, tokens[at]]) for at in range(prompt, len(tokens))]
        np.testing.assert_allclose(sequence.log_probs, expected, atol=1e-4)
        assert sequence.reward == len(response)
        group = responses[index // 8 * 8 : index // 8 * 8 + 8]
        mean = sum(map(len, group)) / 8
        assert abs(sequence.advantage - (len(response) - mean)) < 1e-9
