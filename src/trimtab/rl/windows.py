"""`Windows`: responses of a rank that are generated over several RL steps, at most a window of new tokens in each."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from trimtab.array_type import Array
from trimtab.integrations.transformers import moe_blocks, num_experts, record_routing
from trimtab.rl.collectives import gather
from trimtab.rl.rollout import SampledLogProbs, generate
from trimtab.rl.sequences import Sequence
from trimtab.rl.task import MAX_TERMS, SUM, Problem, draw_problem
from trimtab.trace import id_dtype


@dataclass(frozen=True, eq=False)
class OpenResponse:
    """A prompt and its response so far; attributes as of `Sequence`. A new one has only the prompt, and no rows."""

    problem: Problem
    token_ids: Array
    prompt_length: int
    expert_ids: Array
    row_versions: Array
    log_probs: Array


class Windows:
    """A batch of fixed size on one rank, whose places are taken by new prompts when responses end.

    A response stays in the batch with its tokens, log-probabilities and routing. The next step feeds all of its tokens
    again, with the weights of that step, to rebuild the cache. Its recorded rows don't change: the rows of a window are
    those of the tokens that were fed in it for the first time.

    Args:
        places: responses that are generated together.
        window: most new tokens of a response in a step.
        max_new_tokens: most tokens of a response. One that reaches them has ended.
        seed: of the run.
        operation: of the problems.
    """

    def __init__(self, places: int, *, window: int, max_new_tokens: int, seed: int, operation: str = SUM) -> None:
        self.places, self.window, self.max_new_tokens, self.seed = places, window, max_new_tokens, seed
        self.operation = operation
        self.open: list[OpenResponse] = []

    def advance(self, model: nn.Module, tokenizer: Any, step: int) -> list[Sequence]:
        """Generate a window of all responses. Returns those of all places, incomplete ones too.

        Args:
            model, tokenizer: to sample with.
            step: index of the RL step, which is the version of the weights.
        """
        rank = dist.get_rank()
        rng = random.Random(f"windows {self.seed} {step} {rank}")
        torch.manual_seed((self.seed * 1_000_003 + step) * dist.get_world_size() + rank)
        batch = [*self.open]
        while len(batch) < self.places:
            batch.append(_new_response(draw_problem(rng, held_out=False, operation=self.operation), model, tokenizer))
        grown = self._generate(model, tokenizer, batch, step)
        sequences = [
            self._sequence(before, after, rebuilt, tokenizer)
            for before, (after, rebuilt) in zip(batch, grown, strict=True)
        ]
        self.open = [response for (response, _), s in zip(grown, sequences, strict=True) if not s.is_finished]
        return sequences

    def _generate(
        self, model: nn.Module, tokenizer: Any, batch: list[OpenResponse], step: int
    ) -> list[tuple[OpenResponse, Array]]:
        """The responses with a new window, and the routing of all their rows in this step."""
        width = max(len(response.token_ids) for response in batch)
        tokens = np.full((len(batch), width), tokenizer.pad_token_id, np.int64)
        mask = np.zeros_like(tokens)
        for row, response in enumerate(batch):
            tokens[row, width - len(response.token_ids) :] = response.token_ids
            mask[row, width - len(response.token_ids) :] = 1
        device = next(model.parameters()).device
        prompts = {
            "input_ids": torch.from_numpy(tokens).to(device),
            "attention_mask": torch.from_numpy(mask).to(device),
        }
        sampled = SampledLogProbs()
        with record_routing(model) as record:
            found = generate(model, tokenizer, prompts, self.window, sampled)
        routing = record.trace(found, mask, eos_token_id=tokenizer.eos_token_id)
        log_probs = sampled.of(torch.from_numpy(found[:, width:]))
        grown = []
        for row, response in enumerate(batch):
            room = min(self.window, self.max_new_tokens - len(response.token_ids) + response.prompt_length)
            new = found[row, width : width + room]
            ends = np.flatnonzero(new == tokenizer.eos_token_id)
            new = new[: ends[0] + 1] if len(ends) else new
            known, fed = len(response.expert_ids), len(response.token_ids) + len(new) - 1
            rebuilt = routing.sequence(row)[:fed]
            after = replace(
                response,
                token_ids=np.concatenate([response.token_ids, new]),
                expert_ids=np.concatenate([response.expert_ids, rebuilt[known:]]),
                row_versions=np.append(response.row_versions, np.full(fed - known, step, np.int32)),
                log_probs=np.append(response.log_probs, log_probs[row, : len(new)]),
            )
            grown.append((after, rebuilt))
        return grown

    def _sequence(self, before: OpenResponse, after: OpenResponse, rebuilt: Array, tokenizer: Any) -> Sequence:
        response = after.token_ids[after.prompt_length :]
        is_finished = bool(response[-1] == tokenizer.eos_token_id) or len(response) == self.max_new_tokens
        return Sequence(
            token_ids=after.token_ids,
            prompt_length=after.prompt_length,
            expert_ids=after.expert_ids,
            reward=after.problem.reward(tokenizer.decode(response)) if is_finished else 0.0,
            advantage=0.0,
            log_probs=after.log_probs,
            is_finished=is_finished,
            # The last token of the window before had no advantage then.
            trained_tokens=max(0, len(before.token_ids) - before.prompt_length - 1),
            row_versions=after.row_versions,
            rebuilt_ids=rebuilt.copy() if len(before.expert_ids) else None,
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Open responses of all ranks, in rank order, on rank 0; empty tensors on other ranks. Collective."""
        of_ranks = gather(self.open)
        every = [response for responses in of_ranks for response in responses]
        terms = np.full((len(every), MAX_TERMS), -1, np.int64)
        for row, response in enumerate(every):
            terms[row, : len(response.problem.terms)] = response.problem.terms
        arrays = {
            "rank": np.repeat(np.arange(len(of_ranks)), [len(responses) for responses in of_ranks]),
            "ranks": np.array([len(of_ranks)]),
            "terms": terms,
            "prompt_length": np.array([response.prompt_length for response in every], np.int64),
            "length": np.array([len(response.token_ids) for response in every], np.int64),
        }
        for name in ("token_ids", "expert_ids", "row_versions", "log_probs"):
            parts = [getattr(response, name) for response in every]
            arrays[name] = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return {f"windows/{name}": torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue with the responses of this rank. With another number of ranks, responses are dealt out in turn."""
        arrays = {name.removeprefix("windows/"): state[name].numpy() for name in state if name.startswith("windows/")}
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        count = len(arrays["rank"])
        owner = arrays["rank"] if int(arrays["ranks"][0]) == num_ranks else np.arange(count) % num_ranks
        lengths, prompts = arrays["length"], arrays["prompt_length"]
        tokens = np.append(0, np.cumsum(lengths))
        rows = np.append(0, np.cumsum(lengths - 1))
        sampled = np.append(0, np.cumsum(lengths - prompts))
        self.open = [
            OpenResponse(
                problem=Problem(tuple(term for term in arrays["terms"][index].tolist() if term >= 0), self.operation),
                token_ids=arrays["token_ids"][tokens[index] : tokens[index + 1]],
                prompt_length=int(prompts[index]),
                expert_ids=arrays["expert_ids"][rows[index] : rows[index + 1]],
                row_versions=arrays["row_versions"][rows[index] : rows[index + 1]],
                log_probs=arrays["log_probs"][sampled[index] : sampled[index + 1]],
            )
            for index in np.flatnonzero(owner == rank).tolist()
        ]


def _new_response(problem: Problem, model: Any, tokenizer: Any) -> OpenResponse:
    prompt = np.array(tokenizer(problem.prompt)["input_ids"], np.int64)
    return OpenResponse(problem, prompt, len(prompt), _no_rows(model), np.empty(0, np.int32), np.empty(0, np.float32))


def _no_rows(model: Any) -> Array:
    """`[0, L, K]`, in the dtype of recorded ids."""
    layers = len(moe_blocks(model))
    return np.empty((0, layers, model.config.num_experts_per_tok), id_dtype(num_experts(model.config)))
