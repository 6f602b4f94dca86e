"""`deep_ep` in plain torch over gloo: the classes and functions that Megatron's flex dispatcher calls.

Their contract is that of DeepEP's public Python code: `deep_ep/buffers/legacy.py`, and `deep_ep/hybrid_ep_buffer.py` of
the branch `hybrid-ep`. Assertions stand for what the kernels require. Padding is NaN.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from examples import megatron_on_cpu


def use_deep_ep() -> None:
    """Make Megatron's flex dispatcher use this module."""
    # Megatron decorates the flex dispatcher with `torch.compile`.
    torch._dynamo.config.disable = True
    module, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    vars(module).update(Buffer=Buffer, HybridEPBuffer=HybridEPBuffer, utils=utils)
    vars(utils).update(EventHandle=EventHandle, EventOverlap=EventOverlap)
    sys.modules["deep_ep"], sys.modules["deep_ep.utils"] = module, utils
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    functions = vars(importlib.reload(fused_a2a))
    names = "fused_dispatch", "fused_combine", "set_deepep_num_sms", "hybrid_ep_dispatch", "hybrid_ep_combine"
    vars(token_dispatcher).update({name: functions[name] for name in names})
    for method in (_record, _synchronize):
        setattr(megatron_on_cpu._NoStream, method.__name__[1:], method)


class EventHandle:
    """A CUDA event."""


class EventOverlap:
    """An event, after the dispatches that did not wait so far."""

    def __init__(self, event: Any = None) -> None:
        self.event, self.launched = event, Buffer.launched

    def current_stream_wait(self) -> None:
        Buffer.in_stream = max(Buffer.in_stream, self.launched)


def _record(event: Any, *_streams: Any) -> None:
    event.seen = Buffer.in_stream


def _synchronize(event: Any) -> None:
    Buffer.read = max(Buffer.read, vars(event).get("seen", 0))


class _Sizes:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, _ranks: int) -> int:
        return 64 * hidden_bytes

    def get_rdma_buffer_size_hint(self, _hidden_bytes: int, _ranks: int) -> int:
        return 0


class _Sent(NamedTuple):
    """The token of each row that this rank sends, by rank; rows to and from each rank; this rank's tokens; rows with
    padding that arrive."""

    tokens: torch.Tensor
    sent: list[int]
    received: list[int]
    num_tokens: int
    size: int


class Buffer:
    """DeepEP's buffer: a token is sent once to each rank that has any of its experts. `waited` has the numbers of local
    experts of dispatches for whose sizes the host waited. Of those that did not wait, `launched` counts all,
    `in_stream` those that the compute stream waits for, and `read` those that have run for sure."""

    launched = in_stream = read = 0

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.waited: set[int] = set()
        Buffer.launched = Buffer.in_stream = Buffer.read = 0

    @staticmethod
    def get_dispatch_config(_ranks: int) -> _Sizes:
        return _Sizes()

    get_combine_config = get_dispatch_config

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        assert num_sms % 2 == 0

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:  # fmt: skip
        """Tokens of each rank and each expert, and which token goes to which rank."""
        ranks = self.group.size()
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        assert num_experts % ranks == 0
        assert 0 <= topk_idx.min() <= topk_idx.max() < num_experts
        of_rank = torch.zeros(len(topk_idx), ranks, dtype=torch.bool)
        of_rank.scatter_(1, topk_idx // (num_experts // ranks), value=True)
        of_expert = torch.bincount(topk_idx.view(-1), minlength=num_experts)
        return of_rank.sum(0).int(), None, of_expert.int(), of_rank, EventOverlap()

    def dispatch(
        self, x: torch.Tensor, handle: _Sent | None = None, num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None, is_token_in_rank: Any = None, num_tokens_per_expert: Any = None,
        topk_idx: Any = None, topk_weights: Any = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
        config: Any = None, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:  # fmt: skip
        """Send tokens. With a handle only `x`. With `num_worst_tokens` that many rows return, and no counts."""
        assert x.ndim == 2
        assert x.is_contiguous()
        assert expert_alignment == 1
        if handle is not None:
            assert topk_idx is topk_weights is None
            assert len(x) == handle.num_tokens
            rows = _padded(_exchange(x[handle.tokens], handle, self.group), handle.size, torch.nan)
            return rows, None, None, None, None, EventOverlap()
        assert topk_weights.dtype == torch.float32
        ranks, tokens = is_token_in_rank.T.nonzero().unbind(1)
        handle = _agree(tokens, num_tokens_per_rank, len(x), self.group)
        local_experts = len(num_tokens_per_expert) // self.group.size()
        ids = topk_idx[tokens] - ranks[:, None] * local_experts
        is_local = (ids >= 0) & (ids < local_experts)
        ids, weights = ids.where(is_local, -1), topk_weights[tokens] * is_local
        ids, weights, rows = (_exchange(each, handle, self.group) for each in (ids, weights, x[tokens]))
        if num_worst_tokens:
            assert num_tokens_per_rdma_rank is None, "only within a node"
            assert num_worst_tokens >= handle.size, "rows that are not there were written"
            handle = handle._replace(size=num_worst_tokens)
            rows, weights = (_padded(each, num_worst_tokens, torch.nan) for each in (rows, weights))
            Buffer.launched += 1
            return rows, _padded(ids, num_worst_tokens, -1), weights, [], handle, EventOverlap()
        assert Buffer.read == Buffer.launched, "the counts of a dispatch that has not run yet were read"
        self.waited.add(local_experts)
        counts = torch.bincount(ids[ids >= 0], minlength=local_experts).tolist()
        return rows, ids, weights, counts, handle, EventOverlap()

    def combine(
        self, x: torch.Tensor, handle: _Sent, topk_weights: torch.Tensor | None = None, bias: None = None,
        config: Any = None, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:  # fmt: skip
        """Send rows back and sum those of each token, without weights."""
        assert x.ndim == 2
        assert x.is_contiguous()
        assert len(x) == handle.size
        summed = []
        for part in (x, topk_weights):
            if part is not None:
                back = _exchange(part[: sum(handle.received)], handle, self.group, back=True)
                summed.append(back.new_zeros(handle.num_tokens, back.shape[1]).index_add_(0, handle.tokens, back))
        return summed[0], summed[1] if len(summed) > 1 else None, EventOverlap()


class _Permuted(NamedTuple):
    """The handle of a HybridEP dispatch. `pairs [2, P]` has the arrived row and the local expert of what is in the
    output rows `places [P]`, by expert; the rest of the `size` output rows is padding, or is not used. `counts
    [experts]` are with padding. `routing_map [T, R * experts]` is of this rank's tokens. `overflow [1]` is not 0 if
    rows were dropped, for which there was no space."""

    sent: _Sent
    experts: int
    pairs: torch.Tensor
    places: torch.Tensor
    size: int
    counts: torch.Tensor
    routing_map: torch.Tensor
    overflow: torch.Tensor


class HybridEPBuffer:
    """HybridEP's buffer. Its memory is for the largest number of local experts, and is `enlarged` if needed; kernels
    are `compiled` by number. `waited` are those numbers of dispatches for whose sizes the host waited, `sizes` the
    others' sizes and rows in use."""

    def __init__(
        self, group: dist.ProcessGroup, hidden_dim: int, max_num_of_tokens_per_rank: int, num_local_experts: int,
        use_fp8: bool, num_sms_dispatch_api: int = 1, num_sms_combine_api: int = 1, **_options: Any,
    ) -> None:  # fmt: skip
        assert num_sms_dispatch_api > 0 < num_sms_combine_api
        assert hidden_dim % 16 == use_fp8 == 0
        self.group, self.tokens, self.experts = group, max_num_of_tokens_per_rank, num_local_experts
        self.enlarged = 0
        self.compiled: set[int] = set()
        self.waited: set[int] = set()
        self.sizes: list[tuple[int, int]] = []

    def dispatch_with_permute(
        self, *, hidden: torch.Tensor, routing_map: Any = None, probs: Any = None, scaling_factor: None = None,
        num_of_experts_per_rank: Any = None, pad_multiple: int | None = None, num_permuted_tokens: Any = None,
        non_blocking: bool = False, handle: _Permuted | None = None,
    ) -> Any:  # fmt: skip
        """Send tokens, and repeat them by local expert. With a handle the routing and probabilities of that are used,
        and only rows are sent."""
        assert hidden.is_contiguous()
        assert scaling_factor is None
        arrived_probs = None
        if handle is None:
            assert non_blocking == (num_permuted_tokens is not None)
            if not non_blocking:
                self.waited.add(num_of_experts_per_rank)
            handle, arrived_probs = self._start(
                hidden, routing_map, probs, num_of_experts_per_rank, pad_multiple or 1, num_permuted_tokens
            )
        else:
            assert routing_map is probs is None
            assert num_permuted_tokens == handle.size
        assert handle.experts in self.compiled
        assert handle.experts <= self.experts
        rows = _exchange(hidden[handle.sent.tokens], handle.sent, self.group)
        # Without a wait they are on the device. Who reads them on the host gets an error here; products that need
        # padding read them there.
        counts = handle.counts.to("meta") if non_blocking and not pad_multiple else handle.counts
        return _spread(rows[handle.pairs[0]], handle.places, handle.size), arrived_probs, None, counts, handle

    def _start(
        self, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor, experts: int, multiple: int,
        size: int | None,
    ) -> tuple[_Permuted, torch.Tensor]:  # fmt: skip
        ranks, count = self.group.size(), len(hidden)
        assert (routing_map.dtype, probs.dtype) == (torch.bool, torch.float32)
        assert all(each.is_contiguous() for each in (routing_map, probs))
        assert routing_map.shape == probs.shape == (count, ranks * experts)
        assert ranks * experts % 4 == 0
        self.enlarged += experts > self.experts or count > self.tokens
        self.experts, self.tokens = max(self.experts, experts), max(self.tokens, count)
        self.compiled.add(experts)
        map_RTE = routing_map.view(count, ranks, experts).transpose(0, 1)
        of_rank, tokens = map_RTE.any(2).nonzero().unbind(1)
        sent = _agree(tokens, map_RTE.any(2).sum(1), count, self.group)
        arrived = _exchange(map_RTE[of_rank, tokens].to(torch.uint8), sent, self.group)
        pairs = arrived.T.nonzero().T.flip(0)
        arrived_probs = _exchange(probs.view(count, ranks, experts)[tokens, of_rank], sent, self.group)
        used = torch.bincount(pairs[1], minlength=experts)
        counts = (used + multiple - 1) // multiple * multiple
        gaps = (counts - used).cumsum(0) - (counts - used)
        places = torch.arange(pairs.shape[1]) + gaps[pairs[1]]
        if size is None:
            size = int(counts.sum())
        else:
            self.sizes.append((int(size), int(counts.sum())))
        fits = places < size
        pairs, places, overflow = pairs[:, fits], places[fits], (~fits).any().int()[None]
        ends = counts.cumsum(0).clamp(max=size)
        counts = ends.diff(prepend=ends.new_zeros(1))
        handle = _Permuted(sent, experts, pairs, places, int(size), counts, routing_map, overflow)
        return handle, _spread(arrived_probs[pairs[0], pairs[1]], places, int(size))

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: _Permuted,
        pad_multiple: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum rows of each token here, send the sums back, and sum them."""
        assert handle.experts in self.compiled
        assert handle.experts <= self.experts
        sent, (rows, experts) = handle.sent, handle.pairs
        assert len(hidden) == handle.size
        summed = hidden.new_zeros(sum(sent.received), hidden.shape[1]).index_add_(0, rows, hidden[handle.places])
        back = _exchange(summed, sent, self.group, back=True)
        combined = back.new_zeros(sent.num_tokens, back.shape[1]).index_add_(0, sent.tokens, back)
        if probs is None:
            return combined, None
        spread = probs.new_zeros(sum(sent.received), handle.experts)
        spread[rows, experts] = probs[handle.places]
        spread = _exchange(spread, sent, self.group, back=True)
        ranks = torch.arange(self.group.size())
        probs_TRE = probs.new_zeros(sent.num_tokens, len(ranks), handle.experts)
        of_rank = ranks.repeat_interleave(torch.tensor(sent.sent))
        probs_TRE[sent.tokens, of_rank] = spread
        return combined, probs_TRE.view(sent.num_tokens, -1)


def _spread(values: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
    """`[size, ...]` with values in places, and zeros elsewhere."""
    return values.new_zeros(size, *values.shape[1:]).index_copy_(0, places, values)


def _agree(tokens: torch.Tensor, counts: torch.Tensor, count: int, group: dist.ProcessGroup) -> _Sent:
    """Exchange the numbers of rows `[R]`."""
    received = torch.empty(group.size(), dtype=torch.int64)
    dist.all_to_all_single(received, counts.to(torch.int64), group=group)
    return _Sent(tokens, counts.tolist(), received.tolist(), count, int(received.sum()))


def _padded(rows: torch.Tensor, size: int, value: float) -> torch.Tensor:
    return torch.cat([rows, rows.new_full((size - len(rows), *rows.shape[1:]), value)])


def _exchange(rows: torch.Tensor, sent: _Sent, group: dist.ProcessGroup, *, back: bool = False) -> torch.Tensor:
    """Rows `[N, ...]` of other ranks."""
    sizes: Sequence[list[int]] = (sent.received, sent.sent) if back else (sent.sent, sent.received)
    arrived = rows.new_empty(sum(sizes[1]), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), sizes[1], sizes[0], group=group)
    return arrived
