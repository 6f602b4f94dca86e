"""`exchange_rows`: sends rows from every rank to every rank, with known split sizes; `RowExchange` in two parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

Wait = Callable[[Callable[[], object]], object]


class RowExchange:
    """Rows on their way. Consecutive parts of `rows [N, H]` go to the ranks of the group.

    Args:
        send_splits, recv_splits: rows to and from each rank, in rank order.
        tag: tag of the messages, equal on all ranks; unused on CUDA. Messages with different tags never match.
        wait: calls a function that waits for the messages; unused on CUDA.
        overlaps: whether something is computed before `finish`. On CUDA the exchange then has a stream of its own.

    Attributes:
        arrived: `[A, H]`, what arrives from the ranks. It is complete after `finish`.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        send_splits: list[int],
        recv_splits: list[int],
        group: dist.ProcessGroup,
        *,
        tag: int = 0,
        wait: Wait = lambda work: work(),
        overlaps: bool = True,
    ) -> None:
        self.arrived = rows.new_empty(sum(recv_splits), *rows.shape[1:])
        # Until they are sent.
        self._rows = rows.contiguous()
        self._wait = wait
        self._works = []
        if rows.is_cuda:
            splits = recv_splits, send_splits
            # None unless it is asynchronous.
            work = dist.all_to_all_single(self.arrived, self._rows, *splits, group=group, async_op=overlaps)
            self._works.append(work)
            return
        # Messages with tags, since gloo's all-to-all ends the process or fills only a part if sizes differ between
        # ranks.
        rank, ranks = dist.get_rank(group), len(send_splits)
        targets, sources = self.arrived.split(recv_splits), self._rows.split(send_splits)
        for distance in range(1, ranks):
            source, target = (rank - distance) % ranks, (rank + distance) % ranks
            if recv_splits[source]:
                self._works.append(dist.irecv(targets[source], group=group, group_src=source, tag=tag))
            if send_splits[target]:
                self._works.append(dist.isend(sources[target], group=group, group_dst=target, tag=tag))
        targets[rank].copy_(sources[rank])

    def finish(self) -> torch.Tensor:
        """What has arrived. The host waits for it; on CUDA the current stream does."""
        if self._rows.is_cuda:
            self._wait_for_rows()
        elif self._works:
            self._wait(self._wait_for_rows)
        return self.arrived

    def _wait_for_rows(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()


def exchange_rows(
    rows: torch.Tensor, send_splits: list[int], recv_splits: list[int], group: dist.ProcessGroup, *, tag: int = 0
) -> torch.Tensor:
    """Send rows as `RowExchange`, and return what arrives, `[A, H]`."""
    return RowExchange(rows, send_splits, recv_splits, group, tag=tag, overlaps=False).finish()
