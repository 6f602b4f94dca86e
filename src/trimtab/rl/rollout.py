"""Rollout: sample responses with the whole model in bfloat16, and record the experts of every token."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from trimtab.array_type import Array
from trimtab.integrations.transformers import record_routing
from trimtab.rl.advantages import group_advantages
from trimtab.rl.sequences import Sequence
from trimtab.rl.task import Problem, draw_problem
from trimtab.rollout.micro_batches import draw_tokens
from trimtab.trace import RoutingTrace

# Responses that have ended are counted when they are this part of all.
MOST = 0.75


class SampledLogProbs(LogitsProcessor):  # type: ignore[misc]
    """Records the log-probabilities of sampled tokens during `generate`, which must not change the distribution.

    `generate` calls it before it samples a token, so a token's log-probability is known at the next call. Memory is
    that of one token's logits, for any number of tokens.

    Args:
        uniforms: `[B, n]` draws in [0, 1) to sample with; None if `generate` samples.
    """

    def __init__(self, uniforms: Array | None = None) -> None:
        self.uniforms = None if uniforms is None else torch.from_numpy(uniforms)
        self._before_BV: torch.Tensor | None = None
        self._columns: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._add(input_ids[:, -1])
        self._before_BV = scores.float().log_softmax(dim=-1)
        if self.uniforms is None:
            return scores
        step = len(self._columns)
        drawn = draw_tokens(self._before_BV, self.uniforms[:, step])
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn[:, None], 0.0)

    def of(self, sampled: torch.Tensor) -> Array:
        """Log-probabilities `[B, n]` float32 of all sampled tokens `[B, n]`, padding after the end included."""
        if len(self._columns) < sampled.shape[1]:
            self._add(sampled[:, -1])
        return torch.stack(self._columns[: sampled.shape[1]], dim=1).cpu().numpy()

    def _add(self, tokens_B: torch.Tensor) -> None:
        if self._before_BV is not None:
            chosen = tokens_B.to(self._before_BV.device)[:, None]
            self._columns.append(self._before_BV.gather(1, chosen).squeeze(1))


class Finished(StoppingCriteria):  # type: ignore[misc]
    """Reports once, when most responses have ended, those that have. It stops nothing.

    Args:
        prompt_width: tokens before the responses.
        end: last token of a response.
        report: called with the rows `[N]` of ended responses, and all tokens `[B, n]` so far.
    """

    def __init__(self, prompt_width: int, end: int, report: Callable[[Array, Array], None]) -> None:
        self._prompt_width, self._end, self._report = prompt_width, end, report
        self.has_reported = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        has_ended_B = (input_ids[:, self._prompt_width :] == self._end).any(dim=1)
        if not self.has_reported and has_ended_B.float().mean() >= MOST:
            self.has_reported = True
            self._report(has_ended_B.nonzero()[:, 0].cpu().numpy(), input_ids.cpu().numpy())
        return torch.zeros_like(has_ended_B)


def sample_groups(
    model: nn.Module,
    tokenizer: Any,
    problems: Sequence_[Problem],
    *,
    samples: int,
    max_new_tokens: int,
    uniforms: Array | None = None,
    count: Callable[[RoutingTrace], None] | None = None,
) -> list[Sequence]:
    """`samples` responses to every problem, with rewards and group-relative advantages (reward minus group mean).

    Args:
        uniforms: `[B, max_new_tokens]` draws of all responses' tokens; None for torch's generator.
        count: called once with the routing of responses that have ended while others generate; it may be of none.
    """
    repeated = [problem for problem in problems for _ in range(samples)]
    prompts = encode(tokenizer, repeated, next(model.parameters()).device)
    sampled = SampledLogProbs(uniforms)
    prompt_width = prompts["input_ids"].shape[1]
    with record_routing(model) as record:

        def report(rows: Array, tokens: Array) -> None:
            mask = prompts["attention_mask"][rows]
            if count is not None:
                count(record.trace(tokens[rows], mask, eos_token_id=tokenizer.eos_token_id))

        finished = Finished(prompt_width, tokenizer.eos_token_id, report)
        tokens = generate(model, tokenizer, prompts, max_new_tokens, sampled, finished)
    routing = record.trace(tokens, prompts["attention_mask"], eos_token_id=tokenizer.eos_token_id)
    if count is not None and not finished.has_reported:
        count(routing.part(0, 0))
    log_probs = sampled.of(torch.from_numpy(tokens[:, prompt_width:]))
    routes = [routing.sequence(row) for row in range(len(repeated))]
    return rewarded(tokenizer, problems, samples, prompts["attention_mask"], tokens, routes, log_probs)


def rewarded(
    tokenizer: Any,
    problems: Sequence_[Problem],
    samples: int,
    mask: torch.Tensor,
    tokens: Array,
    routes: Sequence_[Array],
    log_probs: Array,
) -> list[Sequence]:
    """Generated responses as sequences with rewards and group-relative advantages.

    Args:
        samples: rows of each problem.
        mask: `[B, P]`, of the prompts.
        tokens: `[B, P + n]` of prompts and responses.
        routes: `[t, L, K]` of each row, without padding.
        log_probs: `[B, n]`, of the responses' tokens.
    """
    repeated, prompt_width = [problem for problem in problems for _ in range(samples)], mask.shape[1]
    padding = (prompt_width - mask.sum(dim=1)).tolist()
    responses = [_until_end(row, tokenizer.eos_token_id) for row in tokens[:, prompt_width:]]
    rewards = np.array(
        [p.reward(tokenizer.decode(response)) for p, response in zip(repeated, responses, strict=True)]
    ).reshape(-1, samples)
    advantages = group_advantages(rewards).reshape(-1)
    return [
        Sequence(
            token_ids=tokens[row, pad : prompt_width + len(response)].copy(),
            prompt_length=prompt_width - pad,
            expert_ids=routes[row].copy(),
            reward=float(reward),
            advantage=float(advantage),
            log_probs=log_probs[row, : len(response)].copy(),
        )
        for row, (pad, response, reward, advantage) in enumerate(
            zip(padding, responses, rewards.reshape(-1), advantages, strict=True)
        )
    ]


def count_correct(model: nn.Module, tokenizer: Any, problems: Sequence_[Problem], *, max_new_tokens: int) -> int:
    """Number of problems that the model solves by greedy decoding."""
    if not problems:
        return 0
    prompts = encode(tokenizer, problems, next(model.parameters()).device)
    tokens = generate(model, tokenizer, prompts, max_new_tokens, None)
    return count_solved(tokenizer, problems, tokens[:, prompts["input_ids"].shape[1] :])


def count_solved(tokenizer: Any, problems: Sequence_[Problem], responses: Array) -> int:
    """Number of problems that the responses `[B, n]` solve."""
    ended = [_until_end(row, tokenizer.eos_token_id) for row in responses]
    return sum(int(p.reward(tokenizer.decode(r))) for p, r in zip(problems, ended, strict=True))


def held_out_problems(count: int, operation: str) -> list[Problem]:
    """The same held-out problems for every run."""
    rng = random.Random("held out")
    return [draw_problem(rng, held_out=True, operation=operation) for _ in range(count)]


def encode(tokenizer: Any, problems: Sequence_[Problem], device: torch.device) -> dict[str, torch.Tensor]:
    """Prompts `input_ids` and `attention_mask` `[B, P]`, with padding on the left."""
    encoded = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True, padding_side="left")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: dict[str, torch.Tensor],
    max_new_tokens: int,
    sampled: SampledLogProbs | None,
    finished: Finished | None = None,
) -> Any:
    """Tokens `[B, prompt width + new tokens]` int64 on the host: sampled, or greedy without `sampled`."""
    is_drawn = sampled is None or sampled.uniforms is not None
    how = {"do_sample": False} if is_drawn else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    tokens = model.generate(
        **prompts,
        **how,
        logits_processor=LogitsProcessorList([] if sampled is None else [sampled]),
        stopping_criteria=StoppingCriteriaList([] if finished is None else [finished]),
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return tokens.cpu().numpy()


def _until_end(tokens: Any, end: int) -> Any:
    """A response up to its end token; all of it if it has none."""
    ends = np.flatnonzero(tokens == end)
    return tokens[: ends[0] + 1] if len(ends) else tokens
