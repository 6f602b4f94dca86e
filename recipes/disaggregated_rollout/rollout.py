"""`DisaggregatedRollout`: a model whose attention and experts are on different ranks.

Attention ranks hold all but the experts and generate; expert ranks hold experts and answer. The batch of an attention
rank is split into micro-batches that take turns: while one waits for its experts, the next one computes. The idea is
that of MegaScale-Infer (arXiv 2504.02263); placement and copies of experts by recorded routing are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from recipes.disaggregated_rollout.channels import Channel, Columns, Turns
from recipes.disaggregated_rollout.expert_slots import ExpertSlots
from recipes.rl.responses import Prompts, gather, generate
from trimtab.array_type import Array
from trimtab.integrations.transformers.distributed_experts import check_experts
from trimtab.integrations.transformers.families import expert_products, expert_tensors, moe_blocks, num_experts
from trimtab.runtime.program.grouped_products import ApplyExperts, ExpertWeight, RowGroups
from trimtab.trace import id_dtype


class Generated(NamedTuple):
    """Responses of at most n tokens to B prompts: tokens `[B, P + n]`, with padding after the end token;
    log-probabilities `[B, n]` of the new ones; experts `[B, P + n - 1, L, K]` of all tokens but the last, which mean
    nothing for padding."""

    tokens: Array
    log_probs: Array
    expert_ids: Array


class MicroBatch:
    """Rows of an attention rank's batch that are generated together.

    Attributes:
        channels: to the expert ranks.
        is_token: `[T]`, whether rows of the present forward are tokens, not padding.
        ids: router choices `[T, K]` of every call of a layer.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self.channels, self.is_token, self.ids = channels, np.empty(0, bool), list[Array]()


class DisaggregatedRollout:
    """One rank's part of a model: all but the experts on the first ranks, experts on those after them.

    The model's other parameters move to the meta device. All methods are collective over the default process group.

    Args:
        model: a whole transformers model of a supported type, in eval mode, equal on all ranks.
        attention_ranks: A. With the expert ranks they are all ranks of the default process group.
        expert_ranks: X.
        micro_batches: parts of the batch of each attention rank that take turns.
        copies: slots of an expert rank for copies of hot experts, beside its E / X experts. No more are used than there
            are other experts.

    Attributes:
        weights_L: for each MoE layer, tensors `[S, ...]` of the experts in an expert rank's slots by name; empty on
            attention ranks.
        slots: the experts of every expert rank.
        load_XL: `[X, L]` int64, (token, expert) pairs of every expert rank and layer in the last rollout.
    """

    def __init__(
        self, model: Any, *, attention_ranks: int, expert_ranks: int, micro_batches: int, copies: int = 0
    ) -> None:
        config, blocks = model.config, moe_blocks(model)
        rank, experts_L = dist.get_rank(), [block.experts for block in blocks.values()]
        for index, experts in zip(blocks, experts_L, strict=True):
            check_experts(experts, index, num_experts(config))
        self.model, self.num_attention, self._num_micro, self._copies = model, attention_ranks, micro_batches, copies
        self.slots = ExpertSlots.place(np.zeros((len(blocks), num_experts(config)), np.int64), expert_ranks, copies)
        self.load_XL = np.zeros((expert_ranks, len(blocks)), np.int64)
        self.weights_L: list[dict[str, torch.Tensor]] = []
        dtype, top_k = model.dtype, config.num_experts_per_tok
        hidden, weights = (config.hidden_size, dtype), (top_k, torch.promote_types(dtype, torch.float32))
        self._columns: tuple[Columns, Columns]
        request, answer = (weights, hidden, (top_k, torch.int16)), (hidden,)
        if rank < attention_ranks:
            self._peers, self._columns = range(attention_ranks, dist.get_world_size()), (request, answer)
            for layer, experts in enumerate(experts_L):
                experts.to("meta").forward = lambda *routed, at=layer: self._experts(at, *routed)
        else:
            self._peers, self._columns = range(attention_ranks), (answer, request)
            names = {module: name for name, module in model.named_modules()}
            slots_LS = torch.from_numpy(self.slots.slots_LXS[:, rank - attention_ranks])
            self.weights_L = [
                {
                    f"{names[experts]}.{name}": getattr(experts, name).detach()[slots_S]
                    for name in expert_tensors(experts)
                }
                for experts, slots_S in zip(experts_L, slots_LS, strict=True)
            ]
            self._apply_L = [expert_products(experts) for experts in experts_L]
            model.to("meta")

    @property
    def is_attention(self) -> bool:
        """Whether this rank generates."""
        return dist.get_rank() < self.num_attention

    def generate(
        self, tokenizer: Any, prompts: Prompts | None, new_tokens: int, uniforms: Array | None = None
    ) -> Generated | None:
        """Responses to this rank's prompts; None on expert ranks.

        Args:
            prompts: as for `recipes.rl.responses.generate`, and so the other arguments. B may differ between ranks, and
                be smaller than the number of micro-batches. None for none, as on expert ranks.
        """
        nothing = torch.zeros((0, 1), dtype=torch.int64)
        given = {"input_ids": nothing, "attention_mask": nothing} if prompts is None else prompts
        capacity = max(-(-rows // self._num_micro) * width for rows, width in gather(given["input_ids"].shape))
        channels_M = [
            [Channel(peer, index, capacity, *self._columns) for peer in self._peers] for index in range(self._num_micro)
        ]
        if not self.is_attention:
            self.load_XL = np.stack(gather(serve(channels_M, self.weights_L, self._apply_L))[self.num_attention :])
            return None
        count, width = given["input_ids"].shape
        layers, experts, _ = self.slots.copies_LEX.shape
        routes = count, width + new_tokens - 1, layers, self.model.config.num_experts_per_tok
        result = Generated(
            np.full((count, width + new_tokens), tokenizer.pad_token_id, np.int64),
            np.zeros((count, new_tokens), np.float32),
            np.zeros(routes, id_dtype(experts)),
        )
        rows_M, self._turns = np.array_split(np.arange(count), self._num_micro), Turns(self._num_micro)
        self._batches = [MicroBatch(channels) for channels in channels_M]

        def generate_one(index: int) -> None:
            rows, batch = rows_M[index], self._batches[index]
            mine = {name: value[rows] for name, value in given.items()}

            def mark_ended(_tokens: torch.Tensor, has_ended: torch.Tensor) -> None:
                batch.is_token = ~has_ended.cpu().numpy()

            if len(rows):
                batch.is_token = mine["attention_mask"].flatten().bool().cpu().numpy()
                draws = None if uniforms is None else uniforms[rows]
                tokens, log_probs = generate(self.model, tokenizer, mine, new_tokens, draws, mark_ended)
                result.tokens[rows, : tokens.shape[1]] = tokens
                result.log_probs[rows, : log_probs.shape[1]] = log_probs
                # One forward of all prompts, then one of each token.
                ids = [np.stack(batch.ids[at : at + layers], axis=1) for at in range(0, len(batch.ids), layers)]
                fed = np.concatenate([each.reshape(len(rows), -1, *each.shape[1:]) for each in ids], axis=1)
                result.expert_ids[rows, : fed.shape[1]] = fed
            for channel in batch.channels:
                channel.send()

        self._turns.run(generate_one)
        self.load_XL = np.stack(gather(None)[self.num_attention :])
        return result

    def _experts(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sums `[T, H]` of the experts of tokens, from the expert ranks; 0 for padding.

        Args:
            layer: number of the MoE layer.
            hidden: `[T, H]`.
            ids, weights: `[T, K]`, of the router.
        """
        batch, ids_TK = self._batches[self._turns.now], ids.cpu().numpy()
        batch.ids.append(ids_TK)
        rank_TK, slot_TK = self.slots.assign(layer, np.where(batch.is_token[:, None], ids_TK, -1), dist.get_rank())
        host, scale, rows_X = hidden.cpu(), weights.cpu(), []
        for position, channel in enumerate(batch.channels):
            here_TK = rank_TK == position
            rows = torch.from_numpy(np.flatnonzero(here_TK.any(axis=1)))
            local = torch.from_numpy(np.where(here_TK, slot_TK, -1))
            channel.listen()
            channel.send(scale[rows], host[rows], local[rows])
            rows_X.append(rows)
        self._turns.give_way()
        total = torch.zeros(host.shape, dtype=torch.promote_types(host.dtype, torch.float32))
        for rows, channel in zip(rows_X, batch.channels, strict=True):
            answer = channel.receive()
            assert answer is not None
            total.index_add_(0, rows, answer[0].to(total.dtype))
        return total.to(hidden)

    def place(self, counts_LE: Array) -> int:
        """Place experts and copies by the tokens `[L, E]` of each expert in the step before, the same on all ranks.

        `load` then takes their weights. Returns the number of experts that are on a rank that did not have them.
        """
        before = self.slots
        self.slots = ExpertSlots.place(counts_LE, before.slots_LXS.shape[1], self._copies)
        return self.slots.replaced(before)

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part of the weights of a whole model."""
        for name, tensor in self.model.state_dict().items():
            if not tensor.is_meta:
                tensor.copy_(weights[name])
        for layer, of_layer in enumerate(self.weights_L):
            slots_S = torch.from_numpy(self.slots.slots_LXS[layer, dist.get_rank() - self.num_attention])
            for name, tensor in of_layer.items():
                tensor.copy_(weights[name][slots_S.to(weights[name].device)])


@torch.no_grad()
def serve(
    channels_M: list[list[Channel]], weights_L: Sequence[Mapping[str, torch.Tensor]], apply_L: Sequence[ApplyExperts]
) -> Array:
    """Answer requests until all micro-batches have ended. Returns `[L]` int64, (token, expert) pairs of each layer.

    An expert rank joins the tokens of all attention ranks of a micro-batch.

    Args:
        channels_M: of each micro-batch, to all attention ranks.
        weights_L: for each MoE layer, tensors `[S, ...]` of the experts in this rank's slots, as `expert_tensors`
            orders them.
        apply_L: for each MoE layer, its experts' function.
    """
    call, load_L = 0, np.zeros(len(weights_L), np.int64)
    for channel in (each for channels in channels_M for each in channels):
        channel.listen()
    while any(channels_M):
        layer = call % len(load_L)
        for micro_batch, channels in enumerate(channels_M):
            requests = {channel: columns for channel in channels if (columns := channel.receive()) is not None}
            channels_M[micro_batch] = [*requests]
            if requests:
                load_L[layer] += _answer(requests, [*weights_L[layer].values()], apply_L[layer])
        call += 1
    return load_L


def _answer(requests: dict[Channel, list[torch.Tensor]], weights: Sequence[torch.Tensor], apply: ApplyExperts) -> int:
    """Send weighted sums for the joined rows of requests. Returns the number of (token, expert) pairs."""
    scale, hidden, slots = (torch.cat(parts) for parts in zip(*requests.values(), strict=True))
    flat, device = slots.flatten(), weights[0].device
    order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
    token = order // slots.shape[1]
    groups = RowGroups.of(torch.bincount(flat[order], minlength=len(weights[0])).tolist(), device)
    outputs = apply([ExpertWeight(each) for each in weights], hidden[token].to(device), groups)
    weighted = outputs.cpu().to(scale.dtype) * scale.flatten()[order, None]
    sums = torch.zeros(hidden.shape, dtype=scale.dtype).index_add_(0, token, weighted)
    for channel, part in zip(requests, sums.split([len(columns[0]) for columns in requests.values()]), strict=True):
        channel.listen()
        channel.send(part)
    return len(order)
