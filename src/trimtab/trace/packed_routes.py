"""`pack` and `unpack`: the recorded routing of a sequence in few bytes, for the way from rollout to trainer.

The experts of a token in a layer are a set: the order of ids has no meaning, and they come back ascending. What is
stored of a layer is its tokens' lowest ids, then the distances to the next ones, compressed by zstd. The lowest id of
a token without route is the largest number of the type, with distances of 0.

The bytes, all little-endian: `_HEADER`, `_SIZES`, for each layer its number and compressed size (`_LAYER`), then the
layers one after the other, of uint8, or uint16 with more than 255 experts.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from trimtab.array_type import Array
from trimtab.cores import usable_cores
from trimtab.errors import InputError
from trimtab.trace.routing import no_route

# Magic and CRC-32 of all that follows; tokens, layers, top_k, experts.
_HEADER, _SIZES = struct.Struct("<4sI"), struct.Struct("<IHHH")
_MAGIC = b"TTP2"
_LAYER = np.dtype([("number", "<u2"), ("bytes", "<u4")])


def pack(ids_TLK: Any, num_experts: int, *, layers: Sequence[int] | None = None) -> bytes:
    """The routing of a sequence in few bytes.

    Args:
        ids_TLK: `[tokens, layers, top_k]` expert ids, integers; an array or a torch tensor. Tokens without a route have
            -1, or in uint8 and uint16 `no_route(num_experts)`, in all places of a layer.
        num_experts: of a layer.
        layers: the layers to keep; all by default.

    Raises:
        InputError: if the ids of a token are neither distinct and below `num_experts` nor all unknown; with its place.
    """
    ids_TLK = _integers(ids_TLK)
    tokens, all_layers, top_k = ids_TLK.shape
    kept = list(range(all_layers)) if layers is None else _known(layers, range(all_layers), "the ids have")
    if not 1 <= top_k <= num_experts <= 65535:
        raise InputError(f"the ids are {top_k} of {num_experts} experts; they should be 1 to all of at most 65535")
    if tokens >= 2**32 or max(all_layers, len(kept)) > 65535:
        raise InputError(
            f"the ids are of {tokens} tokens and {all_layers} layers; a payload has less than 2^32 and 2^16"
        )
    unknown = no_route(num_experts) if ids_TLK.dtype.kind == "u" else -1
    # A row for each place of a token, so that all that follows is of whole rows.
    ids_KLT = ids_TLK[:, kept].astype(_dtype(num_experts)).transpose(2, 1, 0).copy()
    # Odd-even transposition sort.
    for turn in range(top_k if top_k > 1 else 0):
        low_NLT, high_NLT = ids_KLT[turn % 2 : -1 : 2], ids_KLT[turn % 2 + 1 :: 2]
        low_NLT[:], high_NLT[:] = np.minimum(low_NLT, high_NLT), np.maximum(low_NLT, high_NLT)
    steps_KLT = ids_KLT.copy()
    steps_KLT[1:] -= ids_KLT[:-1]
    is_wrong_LT = (ids_KLT[-1] >= num_experts) | (steps_KLT[1:] == 0).any(axis=0)
    is_wrong_LT &= ids_KLT[0] != _unknown(num_experts)
    if ids_TLK.size and (ids_TLK.min() < min(unknown, 0) or ids_TLK.max() >= num_experts):
        kept_TLK = ids_TLK[:, kept]
        is_outside_TL = ((kept_TLK < 0) | (kept_TLK >= num_experts)).any(axis=-1)
        is_wrong_LT |= (is_outside_TL & (kept_TLK != unknown).any(axis=-1)).T
    if is_wrong_LT.any():
        token, place = np.argwhere(is_wrong_LT.T)[0]
        raise InputError(
            f"token {token} has the experts {ids_TLK[token, kept[place]].tolist()} in layer {kept[place]}; they should "
            f"be distinct and below {num_experts}, or all {unknown} if its route is unknown"
        )
    with ThreadPoolExecutor(usable_cores()) as pool:
        parts = list(pool.map(lambda place: _compress(steps_KLT[:, place]), range(len(kept))))
    table = np.array(list(zip(kept, map(len, parts), strict=True)), _LAYER)
    content = b"".join([_SIZES.pack(tokens, len(kept), top_k, num_experts), table.tobytes(), *parts])
    return _HEADER.pack(_MAGIC, zlib.crc32(content)) + content


def unpack(payload: Any, *, layers: Sequence[int] | None = None) -> Array:
    """The routing that was packed.

    Args:
        payload: what `pack` returned, or the same bytes as a uint8 array or torch tensor.
        layers: numbers of the layers to unpack; all that are there by default.

    Returns:
        `[tokens, layers, top_k]` expert ids, ascending within a token, -1 where its route is unknown; int16, or int32
        with more than 32,767 experts. `torch.from_numpy` makes a tensor of them without a copy.

    Raises:
        InputError: if these are not the bytes of a payload, or a layer is not among them.
    """
    if isinstance(payload, bytes | bytearray | memoryview):
        payload = np.frombuffer(payload, np.uint8)
    bytes_B = _integers(payload, 1)
    if bytes_B.dtype != np.uint8:
        raise InputError(f"the routing payload is an array of {bytes_B.dtype}; it should be bytes, or uint8")
    magic, content = bytes_B[:4].tobytes(), bytes_B[_HEADER.size :].tobytes()
    if magic != _MAGIC or len(content) < _SIZES.size:
        found = "a routing payload of an earlier version" if magic == b"TTP1" else "not a routing payload"
        raise InputError(f"the bytes are {found}; it should be what this version's pack returned")
    if bytes_B[4 : _HEADER.size].tobytes() != zlib.crc32(content).to_bytes(4, "little"):
        raise InputError(f"the routing payload is damaged: the checksum of its {len(bytes_B)} bytes is another")
    tokens, num_layers, top_k, num_experts = _SIZES.unpack(content[: _SIZES.size])
    sizes = np.frombuffer(content, _LAYER, num_layers, _SIZES.size)
    ends_L = _SIZES.size + sizes.nbytes + np.cumsum(sizes["bytes"], dtype=np.int64)
    present = sizes["number"].tolist()
    wanted = present if layers is None else _known(layers, present, "the routing payload has")
    ids_KLT = np.empty((top_k, len(wanted), tokens), _dtype(num_experts))

    def read(place: int) -> None:
        at = present.index(wanted[place])
        compressed = content[ends_L[at] - sizes["bytes"][at] : ends_L[at]]
        steps = pa.decompress(compressed, ids_KLT[:, place].nbytes, "zstd") if tokens else b""
        ids_KLT[:, place] = np.frombuffer(steps, ids_KLT.dtype).reshape(top_k, tokens)

    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(read, range(len(wanted))))
    for place in range(1, top_k):
        ids_KLT[place] += ids_KLT[place - 1]
    ids_TLK = np.ascontiguousarray(ids_KLT.transpose(2, 1, 0).astype(np.int16 if num_experts <= 32767 else np.int32))
    ids_TLK[(ids_KLT[0] == _unknown(num_experts)).T] = -1
    return ids_TLK


def _dtype(num_experts: int) -> np.dtype[Any]:
    """The type of ids and distances. Its largest value marks unknown routes."""
    return np.dtype(np.uint8 if num_experts <= 255 else "<u2")


def _unknown(num_experts: int) -> int:
    return int(np.iinfo(_dtype(num_experts)).max)


def _compress(steps_KT: Array) -> bytes:
    return bytes(pa.compress(steps_KT.tobytes(), "zstd", asbytes=True))


def _integers(values: Any, ndim: int = 3) -> Array:
    """An array of integers with that many axes."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    array = np.asarray(values)
    if array.ndim != ndim or array.dtype.kind not in "iu" or array.dtype in (np.uint32, np.uint64):
        shape = "[tokens, layers, top_k]" if ndim == 3 else "[bytes]"
        raise InputError(
            f"the array is {array.dtype} {list(array.shape)}; it should be {shape}, of signed integers, uint8 or uint16"
        )
    if array.dtype.kind == "i" and array.dtype.itemsize < 4:
        array = array.astype(np.int32)
    return array


def _known(layers: Sequence[int], known: Sequence[int], owner: str) -> list[int]:
    wanted = [int(layer) for layer in layers]
    for layer in wanted:
        if layer not in known:
            raise InputError(f"layer {layer} is not there; {owner} {', '.join(map(str, known)) or 'none'}")
    return wanted
