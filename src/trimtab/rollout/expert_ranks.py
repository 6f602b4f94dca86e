"""What an expert rank runs: it joins the tokens of all attention ranks of a micro-batch, and answers each of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.rollout.attention_ranks import Spans
from trimtab.rollout.expert_messages import ANSWER, END, REQUEST, Header, RowFormat
from trimtab.runtime.rows.grouped_products import ApplyExperts, ExpertWeight, RowGroups


class Channel:
    """Messages of one micro-batch from and to one attention rank."""

    def __init__(self, rank: int, micro_batch: int, capacity: int, layout: RowFormat) -> None:
        self.rank, self.micro_batch, self.capacity = rank, micro_batch, capacity
        self.request, self.answer = layout.request(capacity), layout.answer(capacity)
        self.sending: Any = None
        self.listen()

    def listen(self) -> None:
        """Receive the next request while other micro-batches are computed."""
        self.arriving: Any = dist.irecv(self.request, self.rank, tag=self.micro_batch)


class ExpertRank:
    """Experts of one rank.

    Args:
        layout: of rows.
        weights: for each MoE layer, tensors `[S, ...]` of the experts in this rank's slots, in the family's order.
        apply: for each MoE layer, its experts' function.

    Attributes:
        load_L: `[L]` int64, (token, expert) pairs of each layer in the last rollout.
        spans: times of compute of the last rollout; None to not keep them.
    """

    def __init__(
        self, layout: RowFormat, weights: Sequence[Sequence[torch.Tensor]], apply: Sequence[ApplyExperts]
    ) -> None:
        self.layout, self.weights, self.apply = layout, weights, apply
        self.load_L = np.zeros(len(weights), np.int64)
        self.spans: Spans | None = None

    def serve(self, capacity_AM: Array) -> None:
        """Answer requests until all micro-batches of all attention ranks have ended.

        Args:
            capacity_AM: `[A, M]` most tokens of each micro-batch of each attention rank.
        """
        self.load_L[:] = 0
        channels_M = [
            [Channel(rank, index, int(capacity), self.layout) for rank, capacity in enumerate(capacity_A)]
            for index, capacity_A in enumerate(capacity_AM.T)
        ]
        call = 0
        with torch.no_grad():
            while any(channels_M):
                channels_M = [self._answer(channels, call) for channels in channels_M]
                call += 1

    def _answer(self, channels: list[Channel], call: int) -> list[Channel]:
        """Compute one call of a micro-batch. Returns the channels that have not ended."""
        going, rows = [], []
        for channel in channels:
            channel.arriving.wait()
            expected = Header(REQUEST, channel.micro_batch, call)
            header = Header.read(channel.request, expected, channel.capacity, channel.rank)
            if header.kind != END:
                going.append(channel)
                rows.append(header.rows)
        if not going:
            return []
        start = time.perf_counter()
        sums = self._compute(call % len(self.weights), [c.request for c in going], rows)
        for channel, part in zip(going, sums.split(rows), strict=True):
            if channel.sending is not None:
                channel.sending.wait()
            Header(ANSWER, channel.micro_batch, call, len(part)).write(channel.answer)
            to_rows, end = self.layout.answer_rows(channel.answer, len(part))
            to_rows.copy_(part)
            channel.listen()
            channel.sending = dist.isend(channel.answer[:end], channel.rank, tag=channel.micro_batch)
        if self.spans is not None:
            self.spans.append((going[0].micro_batch, start, time.perf_counter()))
        return going

    def _compute(self, layer: int, requests: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
        """Weighted sums `[T, H]` of the tokens of all requests."""
        parts = [self.layout.request_parts(request, count) for request, count in zip(requests, rows, strict=True)]
        scale, hidden, slots = (torch.cat(each) for each in zip(*(part[:3] for part in parts), strict=True))
        weights = self.weights[layer]
        device = weights[0].device
        flat = slots.flatten()
        order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
        counts = torch.bincount(flat[order], minlength=len(weights[0]))
        token = order // self.layout.top_k
        self.load_L[layer] += len(order)
        groups = RowGroups.of(counts.tolist(), device)
        outputs = self.apply[layer]([ExpertWeight(each) for each in weights], hidden[token].to(device), groups)
        weighted = outputs.cpu().to(scale.dtype) * scale.flatten()[order, None]
        return torch.zeros(hidden.shape, dtype=scale.dtype).index_add_(0, token, weighted)
