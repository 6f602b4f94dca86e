"""`pack` and `unpack`: the recorded routing of a sequence in few bytes, for the way from rollout to trainer.

A token uses K of E experts in a layer, a set. Its number among all such sets takes log2(E choose K) bits: 41 for 8 of
128, where int32 ids take 256. The order of ids within a token has no meaning; they come back ascending.

The bytes, all little-endian: a header (`_HEADER`, then the number of each layer as uint16, filled up to 8 bytes), then
the layers one after the other. A layer is a string of bits in 64-bit words, the lowest first. A set c_1 < ... < c_k has
the number C(c_1, 1) + ... + C(c_k, k) (the combinatorial number system). Where this exceeds 63 bits, the
ascending ids are cut into parts with a number each. A token without route has one more number in the first part.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.cores import usable_cores
from trimtab.errors import InputError
from trimtab.kernels import kernel
from trimtab.trace.routing import no_route

# Magic, tokens, layers, top_k, experts.
_HEADER = struct.Struct("<4sIHHH")
_MAGIC = b"TTP1"
_MOST_BITS = 63

# Tokens whose numbers in a layer fill whole words.
BLOCK = 64
# Tokens times layers for which a thread is worth its start.
LEAST_WORK = 20_000


class _Code(NamedTuple):
    """How the ids of a token are numbered.

    Attributes:
        sizes_P: `[P]` ids in each part.
        bits_P: `[P]` bits of each part's number.
        unknown: the number of a token without route, in the first part.
        choose_JC: `[largest part + 1, C]`, C(c, j), at most the largest uint64; C is the next power of 2 above E.
    """

    sizes_P: Array
    bits_P: Array
    unknown: int
    choose_JC: Array

    @property
    def bits(self) -> int:
        """Bits of a token in a layer."""
        return int(self.bits_P.sum())


@cache
def _code(num_experts: int, top_k: int) -> _Code:
    largest = 1
    while largest < top_k and math.comb(num_experts, largest + 1).bit_length() <= _MOST_BITS:
        largest += 1
    parts = -(-top_k // largest)
    sizes = [top_k // parts + (part < top_k % parts) for part in range(parts)]
    numbers = [math.comb(num_experts, size) for size in sizes]
    # The unknown one is the number after the last set.
    bits = [(number - (part > 0)).bit_length() for part, number in enumerate(numbers)]
    columns = 1 << num_experts.bit_length()
    choose = [[min(math.comb(c, j), 2**64 - 1) for c in range(columns)] for j in range(max(sizes) + 1)]
    return _Code(np.array(sizes), np.array(bits), numbers[0], np.array(choose, np.uint64))


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
    if tokens >= 2**32 or all_layers > 65536:
        raise InputError(f"the ids are of {tokens} tokens and {all_layers} layers; a payload has at most 2^32 and 2^16")
    code = _code(num_experts, top_k)
    unknown = no_route(num_experts) if ids_TLK.dtype.kind == "u" else -1
    words_LW = np.zeros((len(kept), -(-tokens * code.bits // 64)), np.uint64)

    def write(first: int, end: int) -> int:
        return int(_write_tokens(ids_TLK, np.array(kept, np.int64), num_experts, unknown, *code, first, end, words_LW))

    bad = _on_threads(write, tokens, len(kept))
    if bad >= 0:
        token, layer = bad // len(kept), kept[bad % len(kept)]
        raise InputError(
            f"token {token} has the experts {ids_TLK[token, layer].tolist()} in layer {layer}; they should be distinct "
            f"and below {num_experts}, or all {unknown} if its route is unknown"
        )
    header = _HEADER.pack(_MAGIC, tokens, len(kept), top_k, num_experts) + np.array(kept, "<u2").tobytes()
    return header + bytes(-len(header) % 8) + words_LW.astype("<u8", copy=False).tobytes()


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
    if len(bytes_B) < _HEADER.size or bytes_B[:4].tobytes() != _MAGIC:
        raise InputError("the bytes are not a routing payload; it should be what pack returned")
    _, tokens, num_layers, top_k, num_experts = _HEADER.unpack(bytes_B[: _HEADER.size].tobytes())
    if not 1 <= top_k <= num_experts:
        raise InputError(f"the routing payload is damaged: it has {top_k} of {num_experts} experts")
    code = _code(num_experts, top_k)
    start = -(-(_HEADER.size + 2 * num_layers) // 8) * 8
    words = -(-tokens * code.bits // 64)
    if len(bytes_B) != start + 8 * num_layers * words:
        raise InputError(
            f"the routing payload is {len(bytes_B)} bytes long; {tokens} tokens in {num_layers} layers take "
            f"{start + 8 * num_layers * words}"
        )
    present = bytes_B[_HEADER.size : _HEADER.size + 2 * num_layers].copy().view("<u2").tolist()
    wanted = present if layers is None else _known(layers, present, "the routing payload has")
    words_LW = bytes_B[start:].copy().view("<u8").astype(np.uint64, copy=False).reshape(num_layers, words)
    ids_TLK = np.empty((tokens, len(wanted), top_k), np.int16 if num_experts <= 32767 else np.int32)
    places_L = np.array([present.index(layer) for layer in wanted], np.int64)

    def read(first: int, end: int) -> int:
        return int(_read_tokens(words_LW, places_L, num_experts, *code, first, end, ids_TLK))

    bad = _on_threads(read, tokens, len(wanted))
    if bad >= 0:
        token, layer = bad // len(wanted), wanted[bad % len(wanted)]
        raise InputError(f"the routing payload is damaged: token {token} of layer {layer} has no valid number")
    return ids_TLK


def _integers(values: Any, ndim: int = 3) -> Array:
    """An array of integers with that many axes, in C order."""
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
    return np.ascontiguousarray(array)


def _known(layers: Sequence[int], known: Sequence[int], owner: str) -> list[int]:
    for layer in layers:
        if layer not in known:
            raise InputError(f"layer {layer} is not there; {owner} {', '.join(map(str, known)) or 'none'}")
    return list(layers)


def _on_threads(work: Callable[[int, int], int], tokens: int, layers: int) -> int:
    """Do the work for ranges of tokens; the smallest of its results that is not -1."""
    threads = max(1, min(usable_cores(), tokens * layers // LEAST_WORK))
    # Blocks of a layer begin with a word.
    share = -(-tokens // (threads * BLOCK)) * BLOCK
    ranges = [(first, min(first + share, tokens)) for first in range(0, tokens, share or 1)]
    if len(ranges) < 2:
        return work(0, tokens)
    with ThreadPoolExecutor(threads) as pool:
        return min((bad for bad in pool.map(lambda each: work(*each), ranges) if bad >= 0), default=-1)


@kernel
def _write_tokens(  # type: ignore[no-untyped-def]
    ids_TLK, layers_L, num_experts, no_route, sizes_P, bits_P, unknown, choose_JC, first_token, end_token, words_LW
):
    """Write the numbers of some tokens, block by block, since those of a token in all layers are near each other.

    Args:
        first_token: a multiple of `BLOCK`.

    Returns:
        token * layers + place of the layer, of a token whose ids are neither distinct and below `num_experts` nor all
        `no_route`; -1 if there is none.
    """
    top_k, num_layers = ids_TLK.shape[2], len(layers_L)
    sorted_K = np.empty(top_k, np.int64)
    for block in range(first_token, end_token, BLOCK):
        for place in range(num_layers):
            layer = layers_L[place]
            word, filled, at = np.uint64(0), 0, block // BLOCK * bits_P.sum()
            for token in range(block, min(block + BLOCK, end_token)):
                num_unknown = 0
                for k in range(top_k):
                    expert = np.int64(ids_TLK[token, layer, k])
                    num_unknown += expert == no_route
                    sorted_K[k] = expert
                # Without branches, which would depend on the ids.
                for turn in range(top_k):
                    for k in range(turn % 2, top_k - 1, 2):
                        one, other = sorted_K[k], sorted_K[k + 1]
                        sorted_K[k] = min(one, other)
                        sorted_K[k + 1] = max(one, other)
                if num_unknown != top_k:
                    fine = sorted_K[0] >= 0 and sorted_K[top_k - 1] < num_experts
                    for k in range(1, top_k):
                        fine &= sorted_K[k] != sorted_K[k - 1]
                    if not fine:
                        return token * num_layers + place
                first = 0
                for p in range(len(sizes_P)):
                    number = np.uint64(0)
                    if num_unknown != top_k:
                        for j in range(sizes_P[p]):
                            number += choose_JC[j + 1, sorted_K[first + j]]
                    elif p == 0:
                        number = np.uint64(unknown)
                    first += sizes_P[p]
                    word |= number << np.uint64(filled)
                    filled += bits_P[p]
                    if filled >= 64:
                        words_LW[place, at] = word
                        at += 1
                        filled -= 64
                        word = number >> np.uint64(bits_P[p] - filled) if filled else np.uint64(0)
            if filled:
                words_LW[place, at] = word
    return -1


@kernel
def _read_tokens(words_LW, places_L, num_experts, sizes_P, bits_P, unknown, choose_JC, first_token, end_token, ids_TLK):  # type: ignore[no-untyped-def]
    """Read the ids of some tokens; see `_write_tokens`.

    Returns:
        The same of a token whose numbers are not those of ascending ids; -1 if there is none.
    """
    num_layers = len(places_L)
    numbers_B = np.empty(BLOCK, np.uint64)
    experts_B = np.empty(BLOCK, np.int64)
    unknown_B = np.empty(BLOCK, np.bool_)
    for block in range(first_token, end_token, BLOCK):
        size_B = min(BLOCK, end_token - block)
        for layer in range(num_layers):
            words_W = words_LW[places_L[layer]]
            first, start, bad = 0, 0, BLOCK
            for p in range(len(sizes_P)):
                bits, size = bits_P[p], sizes_P[p]
                for b in range(size_B):
                    at = (block + b) * bits_P.sum() + start
                    word, shift = at // 64, at % 64
                    number = words_W[word] >> np.uint64(shift)
                    if shift + bits > 64:
                        number |= words_W[word + 1] << np.uint64(64 - shift)
                    number &= (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
                    if p == 0:
                        unknown_B[b] = number == np.uint64(unknown)
                        fine = unknown_B[b] or number < choose_JC[size, num_experts]
                    else:
                        fine = number < (np.uint64(1) if unknown_B[b] else choose_JC[size, num_experts])
                    bad = bad if fine else min(bad, b)
                    numbers_B[b] = number
                for j in range(size, 0, -1):
                    # The largest expert with C(expert, j) <= number. A step needs the last one, so tokens take turns.
                    choose_C = choose_JC[j]
                    experts_B[:] = 0
                    step = len(choose_C) // 2
                    while step > 0:
                        for b in range(size_B):
                            experts_B[b] += step * (choose_C[experts_B[b] + step] <= numbers_B[b])
                        step //= 2
                    for b in range(size_B):
                        numbers_B[b] -= choose_C[experts_B[b]]
                        ids_TLK[block + b, layer, first + j - 1] = -1 if unknown_B[b] else experts_B[b]
                if first > 0:
                    for b in range(size_B):
                        ids_K = ids_TLK[block + b, layer]
                        if not unknown_B[b] and ids_K[first] <= ids_K[first - 1]:
                            bad = min(bad, b)
                first += size
                start += bits
            if bad < BLOCK:
                return (block + bad) * num_layers + layer
    return -1
