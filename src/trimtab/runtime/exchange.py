"""The one collective of a MoE layer: rows from every rank to every rank, in known numbers."""

from __future__ import annotations

import torch
import torch.distributed as dist


def exchange_rows(
    rows: torch.Tensor, send_splits: list[int], recv_splits: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send consecutive parts of `rows [N, H]` to the ranks of the group, and return what arrives, `[A, H]`.

    Args:
        send_splits, recv_splits: rows to and from each rank, in rank order.
    """
    arrived = rows.new_empty(sum(recv_splits), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), recv_splits, send_splits, group=group)
    return arrived
