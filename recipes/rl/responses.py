"""Responses: sampled with the whole model in bfloat16, with the experts of every token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import DynamicCache

from recipes.rl.task import Problem
from trimtab.array_type import Array
from trimtab.integrations.transformers import record_routing
from trimtab.trace import RoutingTrace

# Responses that have ended are counted when they are this part of all.
MOST = 0.75
Prompts = dict[str, torch.Tensor]
"""`input_ids` and `attention_mask` `[B, P]`, with padding on the left."""


@dataclass(frozen=True, eq=False)
class Response:
    """A response and its prompt. One that is generated over several steps may be incomplete, and partly trained.

    Attributes:
        token_ids: `[n]` int64, prompt and response.
        prompt_length: tokens of the prompt.
        expert_ids: `[n - 1, L, K]`, the routing that the rollout recorded. The last token was never fed.
        log_probs: `[length]` float32, of the response's tokens when the rollout sampled them.
        reward: of the response; 0 if it is incomplete.
        advantage: reward minus the mean of its group.
        is_finished: whether the response is complete.
        known_tokens: tokens at the start of the response that earlier steps sampled.
        row_versions: `[n - 1]` int32, the step with whose weights a token was fed and the token after it sampled. Rows
            with the same version are a window. None if all have the same.
    """

    token_ids: Array
    prompt_length: int
    expert_ids: Array
    log_probs: Array
    reward: float = 0.0
    advantage: float = 0.0
    is_finished: bool = True
    known_tokens: int = 0
    row_versions: Array | None = None

    @property
    def num_fed(self) -> int:
        """Tokens that training feeds to the model: all but the last."""
        return len(self.token_ids) - 1

    @property
    def length(self) -> int:
        """Tokens of the response."""
        return len(self.token_ids) - self.prompt_length

    @property
    def new_tokens(self) -> int:
        """Tokens that the last step sampled."""
        return self.length - self.known_tokens

    @property
    def trained_tokens(self) -> int:
        """Tokens that the policy was trained on in earlier steps. The last known one had no advantage yet."""
        return max(0, self.known_tokens - 1)

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Version that fed them first, and number, of the rows of every window; none if all have the same version."""
        if self.row_versions is None or self.row_versions[0] == self.row_versions[-1]:
            return ()
        versions, rows = np.unique(self.row_versions, return_counts=True)
        return tuple(zip(versions.tolist(), rows.tolist(), strict=True))

    @property
    def policy_tokens(self) -> int:
        """Tokens that the policy is trained on. The last one of an incomplete response has no advantage yet."""
        return self.length - self.trained_tokens - (not self.is_finished)

    @property
    def value_tokens(self) -> int:
        """Tokens whose value has a return to learn from."""
        return self.length if self.is_finished else 0


def encode(tokenizer: Any, problems: Sequence[Problem], device: torch.device) -> Prompts:
    """The prompts of problems."""
    encoded = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True, padding_side="left")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def response_draws(seed: int, step: int, problems: Iterable[int], samples: int, new_tokens: int) -> Array:
    """Draws `[B, new_tokens]` in [0, 1) of the responses to these problems of a step, `samples` rows each.

    Each response has a random stream of its own, so it does not depend on the rank that samples it.
    """
    responses = [(problem, sample) for problem in problems for sample in range(samples)]
    draws = [np.random.default_rng((seed, step, *each)).random(new_tokens) for each in responses]
    return np.array(draws).reshape(-1, new_tokens)


def draw_tokens(log_probs_BV: torch.Tensor, uniform_B: Array) -> torch.Tensor:
    """Tokens `[B]` int64 of the distributions: the first whose cumulated probability exceeds the draw."""
    cumulated_BV = log_probs_BV.double().exp().cumsum(-1)
    targets = torch.from_numpy(uniform_B).to(cumulated_BV)[:, None] * cumulated_BV[:, -1:]
    return torch.searchsorted(cumulated_BV, targets, right=True)[:, 0].clamp(max=log_probs_BV.shape[1] - 1)


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Prompts,
    new_tokens: int,
    uniforms: Array | None = None,
    on_token: Callable[[torch.Tensor, torch.Tensor], None] = lambda tokens, has_ended: None,
) -> tuple[Array, Array]:
    """Generate at most `new_tokens` tokens after each prompt.

    Args:
        uniforms: `[B, new_tokens]` draws in [0, 1), to sample with temperature 1; None for the most likely tokens.
        on_token: called after each new token with all tokens `[B, P + t]` so far, and whether rows have ended `[B]`.

    Returns:
        Tokens `[B, P + n]` int64, with padding after the end token, and log-probabilities `[B, n]` float32 of the n new
        ones.
    """
    tokens, mask = prompts["input_ids"], prompts["attention_mask"]
    fed, positions = tokens, (mask.cumsum(1) - 1).clamp(min=0)
    cache, log_probs, has_ended = DynamicCache(config=model.config), [], mask.new_zeros(len(mask), dtype=torch.bool)
    for step in range(new_tokens):
        hidden = model.base_model(
            input_ids=fed, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
        ).last_hidden_state[:, -1]
        scores = model.get_output_embeddings()(hidden).float().log_softmax(-1)
        new = scores.argmax(-1) if uniforms is None else draw_tokens(scores, uniforms[:, step])
        new = torch.where(has_ended, tokenizer.pad_token_id, new)
        log_probs.append(scores.gather(1, new[:, None]))
        fed, positions = new[:, None], positions[:, -1:] + 1
        tokens, mask = torch.cat([tokens, fed], dim=1), torch.cat([mask, torch.ones_like(fed)], dim=1)
        has_ended |= new == tokenizer.eos_token_id
        on_token(tokens, has_ended)
        if has_ended.all():
            break
    return tokens.cpu().numpy(), torch.cat(log_probs, dim=1).cpu().numpy()


def until_end(tokens: Array, end: int) -> Array:
    """A response up to its end token; all of it if it has none."""
    ends = np.flatnonzero(tokens == end)
    return tokens[: ends[0] + 1] if len(ends) else tokens


def sample_groups(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    uniforms: Array,
    count: Callable[[RoutingTrace], None] | None = None,
) -> list[Response]:
    """As many responses to every problem as there are draws, with rewards and group-relative advantages.

    Args:
        uniforms: `[B, n]` draws of all tokens, B a multiple of the number of problems.
        count: called once with the routing of responses that have ended while others generate; it may be of none.
    """
    repeated = [problem for problem in problems for _ in range(len(uniforms) // len(problems))]
    prompts, end = encode(tokenizer, repeated, next(model.parameters()).device), tokenizer.eos_token_id
    mask, waiting = prompts["attention_mask"].cpu(), [] if count is None else [count]
    with record_routing(model) as record:

        def count_ended(tokens: torch.Tensor, has_ended: torch.Tensor) -> None:
            if waiting and has_ended.float().mean() >= MOST:
                rows = has_ended.cpu()
                waiting.pop()(record.trace(tokens.cpu()[rows], mask[rows], eos_token_id=end))

        tokens, log_probs = generate(model, tokenizer, prompts, uniforms.shape[1], uniforms, count_ended)
    for each in waiting:
        each(record.trace(tokens, mask, eos_token_id=end).part(0, 0))
    return rewarded(tokenizer, problems, mask, tokens, log_probs, record.expert_ids(tokens))


def rewarded(
    tokenizer: Any,
    problems: Sequence[Problem],
    mask: torch.Tensor,
    tokens: Array,
    log_probs: Array,
    expert_ids: Array,
) -> list[Response]:
    """Generated tokens as responses with rewards and advantages: the reward minus the mean of its group (GRPO, arXiv
    2402.03300), not divided by the standard deviation, which would weigh problems by their difficulty.

    Args:
        mask: `[B, P]`, of the prompts; B / problems rows of each problem.
        tokens: `[B, P + n]` of prompts and responses.
        log_probs: `[B, n]`, of the responses' tokens.
        expert_ids: `[B, P + n - 1, L, K]`, of all tokens but the last; of padding they mean nothing.
    """
    width, samples = mask.shape[1], len(tokens) // max(1, len(problems))
    texts = [until_end(row, tokenizer.eos_token_id) for row in tokens[:, width:]]
    rewards = np.array([problems[row // samples].reward(tokenizer.decode(text)) for row, text in enumerate(texts)])
    rewards_PS = rewards.reshape(-1, max(1, samples))
    advantages = (rewards_PS - rewards_PS.mean(axis=1, keepdims=True)).reshape(-1)
    padding = (width - mask.sum(dim=1)).tolist()
    return [
        Response(
            token_ids=tokens[row, pad : width + len(text)].copy(),
            prompt_length=width - pad,
            expert_ids=expert_ids[row, pad : width + len(text) - 1].copy(),
            log_probs=log_probs[row, : len(text)].copy(),
            reward=float(rewards[row]),
            advantage=float(advantages[row]),
        )
        for row, (pad, text) in enumerate(zip(padding, texts, strict=True))
    ]


def count_solved(tokenizer: Any, problems: Sequence[Problem], responses: Array) -> int:
    """Number of problems that the responses `[B, n]` solve."""
    texts = [tokenizer.decode(until_end(row, tokenizer.eos_token_id)) for row in responses]
    return sum(int(problem.reward(text)) for problem, text in zip(problems, texts, strict=True))


def gather(value: Any) -> list[Any]:
    """The values of all ranks, in rank order. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
