"""Disaggregated rollouts of small models, compared with the whole model on one rank."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from helpers.moe_families import random_model, small_config
from recipes.disaggregated_rollout.rollout import DisaggregatedRollout, Generated
from trimtab.array_type import Array
from trimtab.integrations.transformers import record_routing

WIDTH, NEW, END = 6, 12, 29
Prompts = dict[str, torch.Tensor]


def whole_model(family: str) -> Any:
    """The same on all ranks."""
    torch.manual_seed(0)
    return random_model(small_config(family), torch.float32).eval()


def make_rollout(family: str, change: Callable[[Any], None] = lambda model: None, **sizes: int) -> DisaggregatedRollout:
    """A rollout of the model after `change`."""
    model = whole_model(family)
    change(model)
    return DisaggregatedRollout(model, **sizes)


def padded_prompts(count: int, seed: int) -> Prompts:
    """Of different lengths, with padding on the left."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(WIDTH) >= torch.arange(count)[:, None] % 4).long()
    return {"input_ids": torch.randint(1, END, (count, WIDTH), generator=generator) * mask, "attention_mask": mask}


def draws(count: int, seed: int) -> Array:
    return np.random.default_rng(seed).random((count, NEW))


def generate(rollout: DisaggregatedRollout, prompts: Prompts, uniforms: Array | None, end: int = END) -> Any:
    """Collective; the prompts are only those of attention ranks."""
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=end)
    return rollout.generate(tokenizer, prompts if rollout.is_attention else None, NEW, uniforms)


def assert_as_whole(
    model: Any, found: Generated, prompts: Prompts, uniforms: Array | None, end: int = END
) -> list[list[int]]:
    """Assert tokens, log-probabilities and routing of the whole model, which is fed each sequence alone, without a
    cache. Returns the responses."""
    tokens, mask = prompts["input_ids"], prompts["attention_mask"]
    responses = []
    for row in range(len(tokens)):
        known = tokens[row][mask[row] == 1].tolist()
        start, log_probs = len(known), []
        with torch.no_grad():
            while len(known) - start < NEW and (len(known) == start or known[-1] != end):
                scores = model(input_ids=torch.tensor([known])).logits[0, -1].log_softmax(-1)
                step = len(known) - start
                if uniforms is None:
                    known.append(int(scores.argmax()))
                else:
                    # The first token at which the cumulated probability passes the draw.
                    passed = np.cumsum(scores.double().exp().numpy()) > uniforms[row, step]
                    known.append(int(np.argmax(passed)))
                log_probs.append(float(scores[known[-1]]))
            with record_routing(model) as record:
                model(input_ids=torch.tensor([known]))
        pad = WIDTH - start
        expected = np.zeros(found.tokens.shape[1], np.int64)
        expected[pad : pad + len(known)] = known
        np.testing.assert_array_equal(found.tokens[row], expected)
        np.testing.assert_allclose(found.log_probs[row, : len(log_probs)], log_probs, atol=1e-4)
        ids = record.expert_ids(torch.tensor([known]))[0]
        np.testing.assert_array_equal(found.expert_ids[row, pad : pad + len(ids)], ids)
        responses.append(known[start:])
    return responses
