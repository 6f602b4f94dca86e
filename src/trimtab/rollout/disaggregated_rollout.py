"""`disaggregate`: a model whose attention and experts are on different ranks, for rollouts.

Attention ranks hold all but the experts and generate; expert ranks hold experts and answer. The batch of an attention
rank is split into micro-batches that take turns: while one waits for its experts, the next one computes. The idea is
that of MegaScale-Infer (arXiv 2504.02263); placement and copies of experts by recorded routing are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.integrations.transformers.distributed_experts import check_experts
from trimtab.integrations.transformers.families import family_of, moe_blocks, num_experts
from trimtab.rollout.attention_ranks import AttentionRank, Generated
from trimtab.rollout.expert_messages import RowFormat
from trimtab.rollout.expert_ranks import ExpertRank
from trimtab.rollout.expert_slots import ExpertSlots
from trimtab.runtime import Session
from trimtab.runtime.state.expert_places import ExpertPlaces

__all__ = ["DisaggregatedRollout", "Generated", "check_ranks", "disaggregate"]


def check_ranks(
    config: Any, *, ranks: int, attention_ranks: int, expert_ranks: int, micro_batches: int, copies: int = 0
) -> None:
    """Raise InputError unless a model with this config can be disaggregated so; arguments as of `disaggregate`."""
    experts = num_experts(config)
    if min(attention_ranks, expert_ranks, micro_batches) < 1 or copies < 0:
        raise InputError(
            f"{attention_ranks} attention ranks, {expert_ranks} expert ranks, {micro_batches} micro-batches and "
            f"{copies} copies; the first three should be at least 1, and copies at least 0"
        )
    if attention_ranks + expert_ranks != ranks:
        raise InputError(
            f"{attention_ranks} attention ranks and {expert_ranks} expert ranks are {attention_ranks + expert_ranks}; "
            f"together they should be the {ranks} ranks"
        )
    if experts % expert_ranks:
        raise InputError(f"{expert_ranks} expert ranks don't divide {experts} experts")


def disaggregate(
    model: nn.Module, *, attention_ranks: int, expert_ranks: int, micro_batches: int, copies: int = 0
) -> DisaggregatedRollout:
    """Keep this rank's part of a model: all but the experts on the first ranks, experts on those after them.

    The other parameters move to the meta device. Collective over the default process group.

    Args:
        model: a whole transformers model of a supported type, in eval mode, equal on all ranks.
        attention_ranks: A. With the expert ranks they are all ranks of the default process group.
        expert_ranks: X.
        micro_batches: parts of the batch of each attention rank that take turns.
        copies: slots of an expert rank for copies of hot experts, beside its E / X experts.

    Raises:
        InputError: if the numbers of ranks don't fit, the model's type is not supported, or its experts are not plain
            tensors. The model is then unchanged.
    """
    config: Any = model.config
    family, blocks = family_of(config), moe_blocks(model)
    check_ranks(
        config, ranks=dist.get_world_size(), attention_ranks=attention_ranks, expert_ranks=expert_ranks,
        micro_batches=micro_batches, copies=copies,
    )  # fmt: skip
    for index, block in blocks.items():
        check_experts(family, block.experts, index, num_experts(config))
    slots = ExpertSlots.place(np.zeros((len(blocks), num_experts(config)), np.int64), expert_ranks, copies)
    return DisaggregatedRollout(model, attention_ranks, micro_batches, copies, slots)


class DisaggregatedRollout:
    """One rank's part of a disaggregated model. Made by `disaggregate`.

    Attributes:
        side: what this rank runs.
        slots: the experts of every expert rank.
        replaced: experts that `place` has put on ranks that did not have them.
        load_XL: `[X, L]` int64, (token, expert) pairs of every expert rank and layer in the last rollout.
    """

    def __init__(
        self, model: nn.Module, attention_ranks: int, micro_batches: int, copies: int, slots: ExpertSlots
    ) -> None:
        config: Any = model.config
        self.model, self.slots, self.replaced = model, slots, 0
        self.num_attention, self.num_expert_ranks = attention_ranks, slots.slots_LXS.shape[1]
        self._micro_batches, self._copies, self._rank = micro_batches, copies, dist.get_rank()
        self.load_XL = np.zeros((self.num_expert_ranks, len(slots.slots_LXS)), np.int64)
        family, blocks = family_of(config), list(moe_blocks(model).values())
        tensors_L = [[getattr(block.experts, name) for name in family.parameters] for block in blocks]
        layout = RowFormat(config.hidden_size, config.num_experts_per_tok, tensors_L[0][0].dtype)
        experts = {id(tensor) for tensors in tensors_L for tensor in tensors}
        self._experts = {name for name, tensor in model.named_parameters() if id(tensor) in experts}
        self.side: AttentionRank | ExpertRank
        if self.is_attention:
            expert_ranks = range(attention_ranks, attention_ranks + self.num_expert_ranks)
            self.side = AttentionRank(model, layout, expert_ranks, slots)
            for layer, block in enumerate(blocks):
                block.experts.to("meta")
                block.experts.forward = partial(self.side.experts, layer)
        else:
            own = [torch.from_numpy(slots_S) for slots_S in slots.slots_LXS[:, self._rank - attention_ranks]]
            weights = [[t.detach()[mine] for t in tensors] for tensors, mine in zip(tensors_L, own, strict=True)]
            self.side = ExpertRank(layout, weights, [family.apply(block.experts) for block in blocks])
            model.to("meta")

    @property
    def is_attention(self) -> bool:
        """Whether this rank generates."""
        return self._rank < self.num_attention

    def generate(
        self,
        prompts: Mapping[str, torch.Tensor] | None,
        *,
        max_new_tokens: int,
        eos_token_id: int | None = None,
        pad_token_id: int = 0,
        uniforms: Array | None = None,
    ) -> Generated | None:
        """Responses to this rank's prompts; None on expert ranks. Collective.

        Args:
            prompts: `input_ids` and `attention_mask` `[B, P]`, with padding on the left; None on expert ranks. B may
                differ between ranks, and be 0 or smaller than the number of micro-batches.
            max_new_tokens: most tokens of a response.
            eos_token_id: last token of a response; None if there is none.
            pad_token_id: fills rows after the end.
            uniforms: `[B, max_new_tokens]` draws of `stream`, one row a sequence, to sample with temperature 1; None
                for the most likely tokens.
        """
        count, width = (0, 0) if prompts is None else prompts["input_ids"].shape
        sizes_AM = [
            [(part.stop - part.start) * size[1] for part in _split(size[0], self._micro_batches)]
            for size in _of_all_ranks(np.array([count, width]))[: self.num_attention].tolist()
        ]
        generated = None
        if isinstance(self.side, ExpertRank):
            self.side.serve(np.array(sizes_AM))
        else:
            assert prompts is not None, "attention ranks need prompts"
            parts = _split(count, self._micro_batches)
            generated = self.side.generate(
                prompts["input_ids"], prompts["attention_mask"], parts, uniforms, max_new_tokens, eos_token_id,
                pad_token_id,
            )  # fmt: skip
        load_L = self.side.load_L if isinstance(self.side, ExpertRank) else np.zeros(self.load_XL.shape[1], np.int64)
        self.load_XL = _of_all_ranks(load_L)[self.num_attention :]
        return generated

    def place(self, counts_LE: Array) -> int:
        """Place experts and copies by the load of the step before; `load` then sends their weights.

        Args:
            counts_LE: `[L, E]` tokens of each expert, the same on all ranks.

        Returns:
            The number of experts that are on a rank that did not have them.
        """
        before = self.slots
        self.slots = ExpertSlots.place(counts_LE, self.num_expert_ranks, self._copies)
        if isinstance(self.side, AttentionRank):
            self.side.slots = self.slots
        replaced = self.slots.replaced(before)
        self.replaced += replaced
        return replaced

    @torch.no_grad()
    def load(self, model: nn.Module, session: Session) -> None:
        """Copy trained weights: attention ranks copy theirs, and home ranks send experts to expert ranks. Collective.

        Args:
            model: the trained model of the same architecture, with this rank's experts of the session.
            session: of the training, over all ranks of the default process group.
        """
        if self.is_attention:
            trained = dict(model.named_parameters()) | dict(model.named_buffers())
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                if name not in self._experts:
                    tensor.copy_(trained[name])
        for layer, home in enumerate(session.homes):
            for number, parameter in enumerate(home.parameters):
                self._send_experts(layer, number, parameter, home.places)

    def _send_experts(self, layer: int, number: int, parameter: torch.Tensor, places: ExpertPlaces) -> None:
        """Send this rank's home experts of one tensor to the slots of expert ranks."""
        slots_RS = [np.empty(0, np.int64)] * self.num_attention + [*self.slots.slots_LXS[layer]]
        sent_R = [slots_S[places.home_E[slots_S] == self._rank] for slots_S in slots_RS]
        rows = torch.from_numpy(places.rows_E[np.concatenate(sent_R)]).to(parameter.device)
        sent = parameter[rows].to(self.side.layout.dtype).flatten(1).contiguous().view(torch.uint8).cpu()
        home_S = places.home_E[slots_RS[self._rank]]
        arrived = sent.new_empty((len(home_S), sent.shape[1]))
        counts_in = np.bincount(home_S, minlength=len(slots_RS)).tolist()
        dist.all_to_all_single(arrived, sent, counts_in, [len(mine) for mine in sent_R])
        if isinstance(self.side, ExpertRank):
            target = self.side.weights[layer][number]
            order = torch.from_numpy(np.argsort(home_S, kind="stable")).to(target.device)
            target[order] = arrived.view(target.dtype).view(target.shape).to(target.device)


def _of_all_ranks(mine: Array) -> Array:
    """`[R, n]`, values `[n]` int64 of all ranks. Collective."""
    values = [torch.empty(mine.shape, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.from_numpy(mine))
    return torch.stack(values).numpy()


def _split(count: int, parts: int) -> list[slice]:
    """Slices of `count` rows, of nearly equal sizes."""
    ends = [count * number // parts for number in range(parts + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]
