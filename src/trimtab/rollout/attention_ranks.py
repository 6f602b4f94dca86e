"""What an attention rank runs: a whole model without experts, generation in micro-batches, and requests to experts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import DynamicCache

from trimtab.array_type import Array
from trimtab.integrations.transformers import num_experts
from trimtab.rollout.expert_messages import ANSWER, END, HEADER_BYTES, REQUEST, Header, RowFormat
from trimtab.rollout.expert_slots import ExpertSlots
from trimtab.rollout.token_draws import draw_tokens
from trimtab.rollout.turns import Turns
from trimtab.trace import id_dtype

Spans = list[tuple[int, float, float]]
"""Number of the micro-batch, start and end of each time of compute, in seconds of `perf_counter`."""


@dataclass(frozen=True, eq=False)
class Generated:
    """Responses to B prompts, with the routing of all fed tokens.

    Attributes:
        tokens: `[B, P + n]` int64, prompts and responses; padding after a response's end.
        lengths: `[B]` int64, tokens of each response, its end included.
        log_probs: `[B, n]` float32, of the responses' tokens; 0 after the end.
        expert_ids: `[B, P + n - 1, L, K]`, of all tokens but the last, those of padding undefined.
    """

    tokens: Array
    lengths: Array
    log_probs: Array
    expert_ids: Array


class MicroBatch:
    """Prompts of a micro-batch, their responses so far, and messages for them.

    Args:
        index: number of the micro-batch.
        prompts, mask: `[B, P]` int64, with padding on the left; B may be 0.
        uniforms: draws `[B, n]` of the responses' tokens; None for the most likely tokens.
    """

    def __init__(self, index: int, prompts: torch.Tensor, mask: torch.Tensor, uniforms: torch.Tensor | None) -> None:
        self.index, self.prompts, self.mask, self.uniforms = index, prompts, mask, uniforms
        self.calls = 0
        self.is_token: Array | None = None
        self.ids: list[Array] = []
        self.requests: list[torch.Tensor] = []
        self.answers: list[torch.Tensor] = []


class AttentionRank:
    """Generation on an attention rank, whose model calls this in place of its experts.

    Args:
        model: without experts.
        layout: of rows.
        expert_ranks: first expert rank, and their number.
        slots: of the expert ranks.

    Attributes:
        spans: times of compute of the last rollout; None to not keep them.
    """

    def __init__(self, model: Any, layout: RowFormat, expert_ranks: range, slots: ExpertSlots) -> None:
        self.model, self.layout, self.expert_ranks, self.slots = model, layout, expert_ranks, slots
        self.num_layers = len(slots.slots_LXS)
        self.spans: Spans | None = None
        self._started = 0.0

    def generate(
        self, batches: list[MicroBatch], *, max_new_tokens: int, eos_token_id: int | None, pad_token_id: int
    ) -> Generated:
        """Responses to the prompts of all micro-batches, joined."""
        self._batches, self._turns = batches, Turns(len(batches))
        for batch in batches:
            capacity = batch.prompts.numel()
            batch.requests = [self.layout.request(capacity) for _ in self.expert_ranks]
            batch.answers = [self.layout.answer(capacity) for _ in self.expert_ranks]
        found: dict[int, Generated] = {}

        def run(index: int) -> None:
            self._started = time.perf_counter()
            batch = batches[index]
            with torch.no_grad():
                found[index] = self._generate(batch, max_new_tokens, eos_token_id, pad_token_id)
            self._keep_span(index)
            # A later micro-batch may be the first to end, so these are waited for at once.
            for position, rank in enumerate(self.expert_ranks):
                Header(END, index, batch.calls).write(batch.requests[position])
                dist.send(batch.requests[position][:HEADER_BYTES], rank, tag=index)

        self._turns.run(run)
        width = max(each.log_probs.shape[1] for each in found.values())
        return join([found[index] for index in range(len(batches))], width, pad_token_id)

    def experts(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sums `[T, H]` of the experts of tokens, from the expert ranks; 0 for padding.

        Args:
            layer: number of the MoE layer.
            hidden: `[T, H]`.
            ids, weights: `[T, K]`, of the router.
        """
        batch, layout = self._batches[self._turns.now], self.layout
        ids_TK = ids.cpu().numpy()
        batch.ids.append(ids_TK)
        if batch.is_token is not None:
            ids_TK = np.where(batch.is_token[:, None], ids_TK, -1)
        slot_TK = self.slots.assign(layer, ids_TK)
        slots_per_rank = self.slots.slots_LXS.shape[2]
        rank_TK = np.where(slot_TK < 0, -1, slot_TK // slots_per_rank)
        works: list[Any] = []
        rows_X = []
        host, host_weights = hidden.cpu(), weights.cpu().to(layout.weight_dtype)
        for position, rank in enumerate(self.expert_ranks):
            here_TK = rank_TK == position
            rows = torch.from_numpy(np.flatnonzero(here_TK.any(axis=1)))
            buffer = batch.requests[position]
            Header(REQUEST, batch.index, batch.calls, len(rows)).write(buffer)
            to_weights, to_hidden, to_slots, end = layout.request_parts(buffer, len(rows))
            torch.index_select(host_weights, 0, rows, out=to_weights)
            torch.index_select(host, 0, rows, out=to_hidden)
            local_TK = np.where(here_TK, slot_TK % slots_per_rank, -1).astype(np.int16)
            torch.index_select(torch.from_numpy(local_TK), 0, rows, out=to_slots)
            works.append(dist.irecv(batch.answers[position], rank, tag=batch.index))
            works.append(dist.isend(buffer[:end], rank, tag=batch.index))
            rows_X.append(rows)
        self._keep_span(batch.index)
        self._turns.give_way()
        for work in works:
            work.wait()
        self._started = time.perf_counter()
        total = torch.zeros(host.shape, dtype=layout.weight_dtype)
        for position, (rank, rows) in enumerate(zip(self.expert_ranks, rows_X, strict=True)):
            expected = Header(ANSWER, batch.index, batch.calls, len(rows))
            Header.read(batch.answers[position], expected, len(rows), rank)
            answer, _ = layout.answer_rows(batch.answers[position], len(rows))
            total.index_add_(0, rows, answer.to(total.dtype))
        batch.calls += 1
        return total.to(hidden)

    def _generate(self, batch: MicroBatch, max_new_tokens: int, eos: int | None, pad: int) -> Generated:
        """Prefill and decode. Sequences leave the batch when they end."""
        mask, device = batch.mask, batch.prompts.device
        count, width = batch.prompts.shape
        tokens = torch.full((count, width + max_new_tokens), pad, device=device)
        tokens[:, :width] = batch.prompts
        log_probs = torch.zeros(count, max_new_tokens)
        lengths = torch.full((count,), max_new_tokens)
        top_k, experts = self.layout.top_k, num_experts(self.model.config)
        expert_ids = np.zeros((count, width + max_new_tokens - 1, self.num_layers, top_k), id_dtype(experts))
        alive, attention, fed = torch.arange(count, device=device), mask, batch.prompts
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        batch.is_token = mask.flatten().bool().cpu().numpy()
        for step in range(max_new_tokens if count else 0):
            hidden = self.model.base_model(
                input_ids=fed, attention_mask=attention, position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state[:, -1]
            scores = self.model.get_output_embeddings()(hidden).float().log_softmax(-1)
            uniforms = None if batch.uniforms is None else batch.uniforms.to(device)[alive, step]
            new = scores.argmax(-1) if uniforms is None else draw_tokens(scores, uniforms)
            rows, at = alive.cpu(), width + step
            first = at - fed.shape[1]
            expert_ids[rows.numpy(), first:at] = np.stack(batch.ids, 1).reshape(len(rows), -1, self.num_layers, top_k)
            tokens[alive, at] = new
            log_probs[rows, step] = scores.gather(1, new[:, None])[:, 0].cpu()
            batch.ids, batch.is_token = [], None
            going = torch.ones_like(new, dtype=torch.bool) if eos is None else new != eos
            lengths[rows[~going.cpu()]] = step + 1
            if not bool(going.all()):
                going = going.nonzero()[:, 0]
                cache.batch_select_indices(going)
                alive, new, attention, positions = (each[going] for each in (alive, new, attention, positions))
            if not len(alive):
                break
            fed, positions = new[:, None], positions[:, -1:] + 1
            attention = torch.cat([attention, torch.ones_like(fed)], dim=1)
        longest = int(lengths.max()) if count else 0
        return Generated(
            tokens[:, : width + longest].cpu().numpy(), lengths.numpy(), log_probs[:, :longest].numpy(),
            expert_ids[:, : width + longest - 1],
        )  # fmt: skip

    def _keep_span(self, micro_batch: int) -> None:
        if self.spans is not None:
            self.spans.append((micro_batch, self._started, time.perf_counter()))


def join(parts: list[Generated], longest: int, pad: int) -> Generated:
    """Responses of several micro-batches, padded to the longest."""

    def padded(name: str, value: int = 0) -> Array:
        arrays = [getattr(part, name) for part in parts]
        missing = [longest - part.log_probs.shape[1] for part in parts]
        return np.concatenate(
            [
                np.pad(array, [(0, 0), (0, more), *[(0, 0)] * (array.ndim - 2)], constant_values=value)
                for array, more in zip(arrays, missing, strict=True)
            ]
        )

    lengths = np.concatenate([part.lengths for part in parts])
    return Generated(padded("tokens", pad), lengths, padded("log_probs"), padded("expert_ids"))
