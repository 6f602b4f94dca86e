"""What an expert rank runs: it joins the tokens of all attention ranks of a micro-batch, and answers each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.rollout.channels import Channel
from trimtab.runtime.rows.grouped_products import ApplyExperts, ExpertWeight, RowGroups


@torch.no_grad()
def serve(
    channels_M: list[list[Channel]], weights_L: Sequence[Sequence[torch.Tensor]], apply_L: Sequence[ApplyExperts]
) -> Array:
    """Answer requests until all micro-batches have ended. Returns `[L]` int64, (token, expert) pairs of each layer.

    Args:
        channels_M: of each micro-batch, to all attention ranks.
        weights_L: for each MoE layer, tensors `[S, ...]` of the experts in this rank's slots, in the family's order.
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
                load_L[layer] += _answer(requests, weights_L[layer], apply_L[layer])
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
