"""`exchange_rows`: sends rows from every rank to every rank, with known split sizes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


def exchange_rows(
    rows: torch.Tensor,
    send_splits: list[int],
    recv_splits: list[int],
    group: dist.ProcessGroup,
    *,
    tag: int = 0,
    wait: Callable[[Callable[[], object]], object] = lambda work: work(),
) -> torch.Tensor:
    """Send consecutive parts of `rows [N, H]` to the ranks of the group, and return what arrives, `[A, H]`.

    Args:
        send_splits, recv_splits: rows to and from each rank, in rank order.
        tag: tag of the messages, equal on all ranks; unused on CUDA. Messages with different tags never match.
        wait: calls a function that waits for the messages; unused on CUDA.
    """
    arrived = rows.new_empty(sum(recv_splits), *rows.shape[1:])
    if rows.is_cuda:
        dist.all_to_all_single(arrived, rows.contiguous(), recv_splits, send_splits, group=group)
        return arrived
    # Messages with tags, since gloo's all-to-all ends the process or fills only a part if sizes differ between ranks.
    rank, ranks = dist.get_rank(group), len(send_splits)
    targets, sources = arrived.split(recv_splits), rows.contiguous().split(send_splits)
    works = []
    for distance in range(1, ranks):
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        if recv_splits[source]:
            works.append(dist.irecv(targets[source], group=group, group_src=source, tag=tag))
        if send_splits[target]:
            works.append(dist.isend(sources[target], group=group, group_dst=target, tag=tag))
    targets[rank].copy_(sources[rank])
    if works:
        wait(lambda: [work.wait() for work in works if work is not None])
    return arrived
