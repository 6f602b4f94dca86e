"""What an attention rank runs: generation in micro-batches, by a model that sends tokens to expert ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import DynamicCache

from trimtab.array_type import Array
from trimtab.rollout.channels import Channel
from trimtab.rollout.expert_slots import ExpertSlots
from trimtab.rollout.turns import Turns


@dataclass(frozen=True, eq=False)
class Generated:
    """Responses of at most n tokens to B prompts, with the routing of all fed tokens.

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


class MicroBatch:
    """Generation for some rows of a rank's batch.

    Args:
        model: calls `experts` in place of its experts.
        channels, slots: to the expert ranks, and theirs.
        turns: of the rank's micro-batches.
    """

    def __init__(self, model: Any, channels: Sequence[Channel], slots: ExpertSlots, turns: Turns) -> None:
        self._model, self._channels, self._slots, self._turns = model, channels, slots, turns
        self._is_token: Array | None = None
        self._ids: list[Array] = []

    @torch.no_grad()
    def generate(
        self, rows: Array, prompts: torch.Tensor, mask: torch.Tensor, uniforms: Array | None, eos: int | None,
        generated: Generated,
    ) -> None:  # fmt: skip
        """Prefill and decode these rows, perhaps none, of a rank's batch. Sequences leave it when they end.

        The other arguments are of the whole batch, see `DisaggregatedRollout.generate`; `generated` gets the responses.
        """
        cache, fed, mask, at = DynamicCache(config=self._model.config), prompts[rows], mask[rows], prompts.shape[1]
        positions, self._is_token = (mask.cumsum(1) - 1).clamp(min=0), mask.flatten().bool().cpu().numpy()
        for step in range(generated.log_probs.shape[1] if len(rows) else 0):
            hidden = self._model.base_model(
                input_ids=fed, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state[:, -1]
            scores = self._model.get_output_embeddings()(hidden).float().log_softmax(-1)
            new = scores.argmax(-1) if uniforms is None else draw_tokens(scores, torch.from_numpy(uniforms[rows, step]))
            ids_BTLK = np.stack(self._ids, axis=1).reshape(len(rows), -1, *generated.expert_ids.shape[2:])
            generated.expert_ids[rows, at - fed.shape[1] : at] = ids_BTLK
            generated.tokens[rows, at] = new.cpu().numpy()
            generated.log_probs[rows, step] = scores.gather(1, new[:, None])[:, 0].cpu().numpy()
            self._ids, self._is_token = [], None
            going_B = generated.tokens[rows, at] != eos
            generated.lengths[rows[~going_B]] = step + 1
            if not going_B.any():
                break
            if not going_B.all():
                going = torch.from_numpy(np.flatnonzero(going_B)).to(new.device)
                cache.batch_select_indices(going)
                rows, new, mask, positions = rows[going_B], new[going], mask[going], positions[going]
            fed, positions, at = new[:, None], positions[:, -1:] + 1, at + 1
            mask = torch.cat([mask, torch.ones_like(fed)], dim=1)
        for channel in self._channels:
            channel.send()

    def experts(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sums `[T, H]` of the experts of tokens, from the expert ranks; 0 for padding.

        Args:
            layer: number of the MoE layer.
            hidden: `[T, H]`.
            ids, weights: `[T, K]`, of the router.
        """
        ids_TK = ids.cpu().numpy()
        self._ids.append(ids_TK)
        if self._is_token is not None:
            ids_TK = np.where(self._is_token[:, None], ids_TK, -1)
        rank_TK, slot_TK = self._slots.assign(layer, ids_TK, dist.get_rank())
        host, scale, rows_X = hidden.cpu(), weights.cpu(), []
        for position, channel in enumerate(self._channels):
            here_TK = rank_TK == position
            rows = torch.from_numpy(np.flatnonzero(here_TK.any(axis=1)))
            local = torch.from_numpy(np.where(here_TK, slot_TK, -1))
            channel.listen()
            channel.send(scale[rows], host[rows], local[rows])
            rows_X.append(rows)
        self._turns.give_way()
        total = torch.zeros(host.shape, dtype=torch.promote_types(host.dtype, torch.float32))
        for rows, channel in zip(rows_X, self._channels, strict=True):
            answer = channel.receive()
            assert answer is not None
            total.index_add_(0, rows, answer[0].to(total.dtype))
        return total.to(hidden)


def draw_tokens(log_probs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Tokens `[B]` int64 of the distributions: the first whose cumulated probability exceeds the draw."""
    cumulated_BV = log_probs_BV.double().exp().cumsum(-1)
    targets = uniform_B.to(cumulated_BV)[:, None] * cumulated_BV[:, -1:]
    return torch.searchsorted(cumulated_BV, targets, right=True)[:, 0].clamp(max=log_probs_BV.shape[1] - 1)
