"""`disaggregate`: a model whose attention and experts are on different ranks, for rollouts.

Attention ranks hold all but the experts and generate; expert ranks hold experts and answer. The batch of an attention
rank is split into micro-batches that take turns: while one waits for its experts, the next one computes. The idea is
that of MegaScale-Infer (arXiv 2504.02263); placement and copies of experts by recorded routing are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.integrations.transformers.distributed_experts import check_experts
from trimtab.integrations.transformers.families import family_of, moe_blocks, num_experts
from trimtab.rollout.channels import Channel, Columns
from trimtab.rollout.expert_ranks import serve
from trimtab.rollout.expert_slots import ExpertSlots
from trimtab.rollout.micro_batches import Generated, MicroBatch
from trimtab.rollout.turns import Turns
from trimtab.runtime import Session
from trimtab.trace import id_dtype


def check_ranks(
    config: Any, ranks: int, *, attention_ranks: int, expert_ranks: int, micro_batches: int, copies: int
) -> None:
    """Raise InputError unless a model with this config can be disaggregated so; arguments as of `disaggregate`."""
    experts, both = num_experts(config), f"{attention_ranks} attention ranks and {expert_ranks} expert ranks"
    if min(attention_ranks, expert_ranks, micro_batches, copies + 1) < 1:
        raise InputError(
            f"{both}, {micro_batches} micro-batches, {copies} copies; should be at least 1, copies at least 0"
        )
    if attention_ranks + expert_ranks != ranks:
        raise InputError(f"{both} are {attention_ranks + expert_ranks}; together they should be the {ranks} ranks")
    if experts % expert_ranks:
        raise InputError(f"{expert_ranks} expert ranks don't divide {experts} experts")


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
        weights_L: for each MoE layer, tensors `[S, ...]` of the experts in an expert rank's slots; None on attention
            ranks.
        slots: the experts of every expert rank.
        load_XL: `[X, L]` int64, (token, expert) pairs of every expert rank and layer in the last rollout.

    Raises:
        InputError: if the numbers of ranks don't fit, the model's type is not supported, or its experts are not plain
            tensors. The model is then unchanged.
    """

    def __init__(
        self, model: nn.Module, *, attention_ranks: int, expert_ranks: int, micro_batches: int, copies: int = 0
    ) -> None:
        config: Any = model.config
        ranks = {"attention_ranks": attention_ranks, "expert_ranks": expert_ranks}
        check_ranks(config, dist.get_world_size(), **ranks, micro_batches=micro_batches, copies=copies)
        family, blocks, count = family_of(config), moe_blocks(model), num_experts(config)
        for index, block in blocks.items():
            check_experts(family, block.experts, index, count)
        self.model, self.num_attention, self._num_micro, self._copies = model, attention_ranks, micro_batches, copies
        self.slots = ExpertSlots.place(np.zeros((len(blocks), count), np.int64), expert_ranks, copies)
        self.load_XL = np.zeros((expert_ranks, len(blocks)), np.int64)
        self.weights_L: list[list[torch.Tensor]] | None = None
        experts_L = [block.experts for block in blocks.values()]
        tensors_L = [[getattr(experts, name).detach() for name in family.parameters] for experts in experts_L]
        hidden, top_k = (config.hidden_size, tensors_L[0][0].dtype), config.num_experts_per_tok
        weights, self._top_k = (top_k, torch.promote_types(hidden[1], torch.float32)), top_k
        self._columns: tuple[Columns, Columns]
        request, answer = (weights, hidden, (top_k, torch.int16)), (hidden,)
        self._dtype, rank = hidden[1], dist.get_rank()
        if rank < attention_ranks:
            self._peers, self._columns = range(attention_ranks, dist.get_world_size()), (request, answer)
            for layer, experts in enumerate(experts_L):
                experts.to("meta").forward = lambda *routed, at=layer: self._batches[self._turns.now].experts(
                    at, *routed
                )
        else:
            self._peers, self._columns = range(attention_ranks), (answer, request)
            slots_LS = torch.from_numpy(self.slots.slots_LXS[:, rank - attention_ranks])
            self.weights_L = [[t[slots_S] for t in ts] for ts, slots_S in zip(tensors_L, slots_LS, strict=True)]
            self._apply_L = [family.apply(experts) for experts in experts_L]
            model.to("meta")

    def generate(
        self, prompts: Mapping[str, torch.Tensor] | None, *, max_new_tokens: int, eos_token_id: int | None = None,
        pad_token_id: int = 0, uniforms: Array | None = None,
    ) -> Generated | None:  # fmt: skip
        """Responses to this rank's prompts; None on expert ranks.

        Args:
            prompts: `input_ids` and `attention_mask` `[B, P]`, with padding on the left. B may differ between ranks,
                and be smaller than the number of micro-batches. None for none, as on expert ranks.
            max_new_tokens: most tokens of a response.
            eos_token_id: last token of a response; None if there is none.
            pad_token_id: fills rows after the end.
            uniforms: `[B, max_new_tokens]` draws in [0, 1), of a random stream for each sequence, to sample with
                temperature 1; None for the most likely tokens.

        Raises:
            InputError: on all ranks, if the prompts or draws of one are not of this form.
        """
        nothing = torch.zeros((0, 1), dtype=torch.int64)
        fed, mask = (nothing, nothing) if prompts is None else (prompts["input_ids"], prompts["attention_mask"])
        problem = "" if prompts is None else _problem(mask.bool(), uniforms, max_new_tokens)
        of_ranks = _of_all_ranks((fed.shape, problem))
        for rank, (_, problem) in enumerate(of_ranks):
            if problem:
                raise InputError(f"rank {rank}: {problem}")
        load_L, generated, indices = None, None, range(self._num_micro)
        capacity = max(-(-rows // self._num_micro) * width for (rows, width), _ in of_ranks)
        channels_M = [[Channel(peer, index, capacity, *self._columns) for peer in self._peers] for index in indices]
        if self.weights_L is None:
            generated = self._generate(channels_M, fed, mask, uniforms, max_new_tokens, eos_token_id, pad_token_id)
        else:
            load_L = serve(channels_M, self.weights_L, self._apply_L)
        self.load_XL = np.stack(_of_all_ranks(load_L)[self.num_attention :])
        return generated

    def place(self, counts_LE: Array) -> int:
        """Place experts and copies by the tokens `[L, E]` of each expert in the step before, the same on all ranks.

        `load` then sends their weights. Returns the number of experts that are on a rank that did not have them.
        """
        before = self.slots
        self.slots = ExpertSlots.place(counts_LE, before.slots_LXS.shape[1], self._copies)
        return self.slots.replaced(before)

    @torch.no_grad()
    def load(self, model: nn.Module, session: Session) -> None:
        """Copy trained weights: attention ranks copy theirs, and home ranks send experts to expert ranks.

        Args:
            model: the trained model of the same architecture, with this rank's experts of the session.
            session: of the training, over all ranks of the default process group.
        """
        trained, rank = dict(model.named_parameters()) | dict(model.named_buffers()), dist.get_rank()
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if not tensor.is_meta:
                tensor.copy_(trained[name])
        for layer, home in enumerate(session.homes):
            home_E, rows_E = home.places.home_E, home.places.rows_E
            slots_RS = [np.empty(0, np.int64)] * self.num_attention + [*self.slots.slots_LXS[layer]]
            sent_R = [slots_S[home_E[slots_S] == rank] for slots_S in slots_RS]
            home_S, rows = home_E[slots_RS[rank]], torch.from_numpy(rows_E[np.concatenate(sent_R)])
            counts = np.bincount(home_S, minlength=len(slots_RS)).tolist(), [len(experts) for experts in sent_R]
            order = torch.from_numpy(np.argsort(home_S, kind="stable"))
            for number, parameter in enumerate(home.parameters):
                # Bytes on the host, since a backend may not know the dtype.
                sent = parameter[rows.to(parameter.device)].to(self._dtype).flatten(1).view(torch.uint8).cpu()
                arrived = sent.new_empty((len(order), sent.shape[1]))
                dist.all_to_all_single(arrived, sent, *counts)
                if self.weights_L is not None:
                    target = self.weights_L[layer][number]
                    target[order.to(target.device)] = arrived.view(target.dtype).view_as(target).to(target.device)

    def _generate(
        self, channels_M: list[list[Channel]], prompts: torch.Tensor, mask: torch.Tensor, uniforms: Array | None,
        new_tokens: int, eos: int | None, pad: int,
    ) -> Generated:  # fmt: skip
        (count, width), (num_layers, num_experts, _) = prompts.shape, self.slots.copies_LEX.shape
        routes = count, width + new_tokens - 1, num_layers, self._top_k
        generated = Generated(
            np.pad(prompts.cpu().numpy(), [(0, 0), (0, new_tokens)], constant_values=pad),
            np.full(count, new_tokens),
            np.zeros((count, new_tokens), np.float32),
            np.zeros(routes, id_dtype(num_experts)),
        )
        rows_M, self._turns = np.array_split(np.arange(count), self._num_micro), Turns(self._num_micro)
        self._batches = [MicroBatch(self.model, channels, self.slots, self._turns) for channels in channels_M]
        self._turns.run(lambda i: self._batches[i].generate(rows_M[i], prompts, mask, uniforms, eos, generated))
        return generated


def _of_all_ranks(mine: Any) -> list[Any]:
    """The values of all ranks. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    return values


def _problem(mask: torch.Tensor, uniforms: Array | None, new_tokens: int) -> str:
    """What is wrong with arguments of `generate`; empty if nothing is."""
    if not mask[:, -1:].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        return "the padding of prompts should be on the left"
    if uniforms is not None and uniforms.shape != (len(mask), new_tokens):
        return f"uniforms are {[*uniforms.shape]}; they should be {[len(mask), new_tokens]}"
    return ""
