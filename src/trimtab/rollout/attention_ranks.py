"""What an attention rank runs: a whole model without experts, generation in micro-batches, and requests to experts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import DynamicCache

from trimtab.array_type import Array
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
        expert_ids: `[B, P + n - 1, L, K]`, of all tokens but the last; those of padding and after the end mean nothing.
    """

    tokens: Array
    lengths: Array
    log_probs: Array
    expert_ids: Array


@dataclass(eq=False)
class MicroBatch:
    """Rows of a rank's batch, and messages for them.

    Attributes:
        index: number of the micro-batch.
        rows: its part of the batch, perhaps none.
        requests, answers: a buffer for each expert rank.
        calls: MoE calls so far.
        is_token: `[T]`, which of the fed tokens are not padding; None if all are.
        ids: experts `[T, K]` of the fed tokens, layer by layer.
    """

    index: int
    rows: slice
    requests: list[torch.Tensor]
    answers: list[torch.Tensor]
    calls: int = 0
    is_token: Array | None = None
    ids: list[Array] = field(default_factory=list)


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
        self.spans: Spans | None = None
        self._started = 0.0

    def generate(
        self, prompts: torch.Tensor, mask: torch.Tensor, parts: list[slice], uniforms: Array | None,
        max_new_tokens: int, eos: int | None, pad: int,
    ) -> Generated:  # fmt: skip
        """Responses to the prompts `[B, P]`, whose `parts` are the micro-batches; see `DisaggregatedRollout`."""
        count, width = prompts.shape
        found = Generated(
            np.pad(prompts.cpu().numpy(), [(0, 0), (0, max_new_tokens)], constant_values=pad),
            np.full(count, max_new_tokens),
            np.zeros((count, max_new_tokens), np.float32),
            np.zeros(
                (count, width + max_new_tokens - 1, len(self.slots.slots_LXS), self.layout.top_k),
                id_dtype(self.slots.num_experts),
            ),
        )
        self._batches, self._turns = [], Turns(len(parts))
        for index, rows in enumerate(parts):
            capacity = width * (rows.stop - rows.start)
            requests, answers = (
                [make(capacity) for _ in self.expert_ranks] for make in (self.layout.request, self.layout.answer)
            )
            self._batches.append(MicroBatch(index, rows, requests, answers))

        def run(index: int) -> None:
            self._started, batch = time.perf_counter(), self._batches[index]
            with torch.no_grad():
                self._generate(batch, prompts[batch.rows], mask[batch.rows], uniforms, max_new_tokens, eos, found)
            self._keep_span(index)
            for rank, buffer in zip(self.expert_ranks, batch.requests, strict=True):
                Header(END, index, batch.calls).write(buffer)
                dist.send(buffer[:HEADER_BYTES], rank, tag=index)

        self._turns.run(run)
        longest = int(found.lengths.max(initial=0))
        return Generated(
            found.tokens[:, : width + longest], found.lengths, found.log_probs[:, :longest],
            found.expert_ids[:, : width + longest - 1],
        )  # fmt: skip

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

    def _generate(
        self, batch: MicroBatch, fed: torch.Tensor, mask: torch.Tensor, uniforms: Array | None, max_new_tokens: int,
        eos: int | None, found: Generated,
    ) -> None:  # fmt: skip
        """Prefill and decode a micro-batch. Sequences leave it when they end."""
        cache, rows = DynamicCache(config=self.model.config), np.arange(batch.rows.start, batch.rows.stop)
        positions, batch.is_token = (mask.cumsum(1) - 1).clamp(min=0), mask.flatten().bool().cpu().numpy()
        for step in range(max_new_tokens):
            if not len(rows):
                return
            hidden = self.model.base_model(
                input_ids=fed, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state[:, -1]
            scores = self.model.get_output_embeddings()(hidden).float().log_softmax(-1)
            new = scores.argmax(-1) if uniforms is None else draw_tokens(scores, torch.from_numpy(uniforms[rows, step]))
            at = found.tokens.shape[1] - max_new_tokens + step
            ids_BTLK = np.stack(batch.ids, axis=1).reshape(len(rows), -1, len(batch.ids), self.layout.top_k)
            found.expert_ids[rows, at - fed.shape[1] : at] = ids_BTLK
            found.tokens[rows, at] = new.cpu().numpy()
            found.log_probs[rows, step] = scores.gather(1, new[:, None])[:, 0].cpu().numpy()
            batch.ids, batch.is_token = [], None
            going_B = found.tokens[rows, at] != eos
            found.lengths[rows[~going_B]] = step + 1
            if not going_B.all():
                going = torch.from_numpy(np.flatnonzero(going_B)).to(new.device)
                cache.batch_select_indices(going)
                rows, new, mask, positions = rows[going_B], new[going], mask[going], positions[going]
            fed, positions = new[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(fed)], dim=1)

    def _keep_span(self, micro_batch: int) -> None:
        if self.spans is not None:
            self.spans.append((micro_batch, self._started, time.perf_counter()))
