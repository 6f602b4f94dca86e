"""Kernels in Triton, each one pass over its tensors; `device_kernels` chooses them, and has the same in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from trimtab.runtime.state.flat_memory import upload

# Elements that a program holds at a time.
TILE = 4096
BLOCK = 1024


def combine_gradients(
    grad: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, row_places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `device_kernels.combine_gradients`; products and sums are in float32."""
    grad, weights = grad.contiguous(), weights.contiguous()
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    width, top_k = rows.shape[1], weights.shape[1]
    block_k = triton.next_power_of_2(top_k)
    block_h = min(triton.next_power_of_2(width), max(1, TILE // block_k))
    with torch.cuda.device_of(rows):
        _combine_gradients[len(weights),](
            grad, rows, weights, row_places, grad_rows, grad_weights, width, top_k, block_k, block_h
        )
    return grad_rows, grad_weights


def add_arrivals(targets: Sequence[torch.Tensor], arrivals: Sequence[Sequence[torch.Tensor]]) -> None:
    """As `device_kernels.add_arrivals`, for contiguous targets of one dtype and contiguous arrivals in float32."""
    first = 4 * len(targets)
    entries, addresses = [], []
    for target, of_target in zip(targets, arrivals, strict=True):
        entries += [target.data_ptr(), target.numel(), first, first + len(of_target)]
        addresses += [arrival.data_ptr() for arrival in of_target]
        first += len(of_target)
    (table,) = upload([np.array(entries + addresses, np.int64)], targets[0].device)
    # Then loads and stores are of 16 bytes.
    is_aligned = all(value % 16 == 0 for value in (*addresses, *entries[::4], *entries[1::4]))
    grid = triton.cdiv(max(target.numel() for target in targets), BLOCK), len(targets)
    with torch.cuda.device_of(table):
        _add_arrivals[grid](table, getattr(tl, str(targets[0].dtype).removeprefix("torch.")), is_aligned, BLOCK)
    # By address, which torch does not see.
    torch.autograd.graph.increment_version(targets)


def multi_hot(ids: torch.Tensor, weights: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `device_kernels.multi_hot`, without a graph."""
    ids, weights = ids.contiguous(), weights.contiguous()
    routing_map, probs = ids.new_empty(len(ids), count, dtype=torch.bool), weights.new_empty(len(ids), count)
    with torch.cuda.device_of(weights):
        _multi_hot[len(ids),](
            ids, weights, routing_map, probs, count, ids.shape[1], min(triton.next_power_of_2(count), BLOCK)
        )
    return routing_map, probs


@triton.jit
def _combine_gradients(  # type: ignore[no-untyped-def]
    grad_TH, rows_NH, weights_TK, places_TK, grad_rows_NH, grad_weights_TK,
    H: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program for each token reads its gradient once, and its K rows."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    weights = tl.load(weights_TK + token * K + k, mask=k < K, other=0.0).to(tl.float32)
    # Offsets of large tensors need 64 bits.
    starts = tl.load(places_TK + token * K + k, mask=k < K, other=0).to(tl.int64) * H
    products = tl.full((BLOCK_K, BLOCK_H), 0.0, tl.float32)
    for start in range(0, H, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        inside = (k < K)[:, None] & (h < H)[None, :]
        places = starts[:, None] + h[None, :]
        grad = tl.load(grad_TH + token * H + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
        products += tl.load(rows_NH + places, mask=inside, other=0.0).to(tl.float32) * grad
        tl.store(grad_rows_NH + places, (weights[:, None] * grad).to(rows_NH.dtype.element_ty), mask=inside)
    sums = tl.sum(products, axis=1).to(grad_weights_TK.dtype.element_ty)
    tl.store(grad_weights_TK + token * K + k, sums, mask=k < K)


@triton.jit
def _add_arrivals(  # type: ignore[no-untyped-def]
    table, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for each block of each target; an entry of the table is its address, its size, and two places of the
    table: the first address of an arrival, and the end of these."""
    entry = table + 4 * tl.program_id(1)
    size = tl.load(entry + 1)
    if IS_ALIGNED:
        size = tl.multiple_of(size, 16)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(entry + 2)
    total = tl.load(_pointer(table + first, tl.float32, IS_ALIGNED) + i, mask=i < size, other=0.0)
    for arrival in range(first + 1, tl.load(entry + 3)):
        total += tl.load(_pointer(table + arrival, tl.float32, IS_ALIGNED) + i, mask=i < size, other=0.0)
    target = _pointer(entry, DTYPE, IS_ALIGNED) + i
    total = tl.load(target, mask=i < size, other=0.0).to(tl.float32) + total
    tl.store(target, total.to(DTYPE), mask=i < size)


@triton.jit
def _pointer(place, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    pointer = tl.load(place).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if IS_ALIGNED else pointer


@triton.jit
def _multi_hot(  # type: ignore[no-untyped-def]
    ids_TK, weights_TK, map_TG, probs_TG, G: tl.constexpr, K: tl.constexpr, BLOCK_G: tl.constexpr
):
    """One program for each token."""
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, G, BLOCK_G):
        g = start + tl.arange(0, BLOCK_G)
        is_chosen = g < 0
        probs = tl.full((BLOCK_G,), 0.0, probs_TG.dtype.element_ty)
        for k in tl.static_range(K):
            is_here = g == tl.load(ids_TK + token * K + k).to(tl.int32)
            is_chosen = is_chosen | is_here
            probs = tl.where(is_here, tl.load(weights_TK + token * K + k), probs)
        tl.store(map_TG + token * G + g, is_chosen, mask=g < G)
        tl.store(probs_TG + token * G + g, probs, mask=g < G)
