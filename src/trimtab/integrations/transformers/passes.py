"""Rows of tokens and their expert ids, assembled from the forwards of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trimtab.array_type import Array


@dataclass(eq=False)
class Call:
    """One forward of a decoder over B rows of t tokens, or a problem of its cache.

    Attributes:
        cache: number of the key-value cache that the forward extends; None if there is no cache.
        past: tokens in the cache before the forward; a tensor if the number is on the device.
        tokens_BT: `[B, t]` int32, the fed tokens.
        ids_LNK: `[L, B * t, K]` ids in a narrow dtype; numpy once they are on the host.
        problem: why rows of the cache can't be identified from here on; empty if they can.
    """

    cache: int | None
    past: int | torch.Tensor = 0
    tokens_BT: torch.Tensor | Array | None = None
    ids_LNK: torch.Tensor | Array | None = None
    problem: str = ""


class Pass:
    """B rows that grow along one key-value cache: a prefill, in one or more calls, and the decode calls after it.

    Attributes:
        problem: why its rows can't be identified; empty if they can.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._calls: list[tuple[int, Array, Array]] = []
        self._width = 0

    def feed(self, call: Call) -> None:
        """Add a call. If the cache was cropped before it, its tokens replace those at the same positions."""
        self.problem = self.problem or call.problem
        tokens, ids, past = call.tokens_BT, call.ids_LNK, int(call.past)
        if self.problem or not isinstance(tokens, np.ndarray) or not isinstance(ids, np.ndarray):
            self._calls.clear()
            return
        rows, width = tokens.shape
        if self._calls and rows != len(self._calls[0][1]):
            self.problem = f"a batch went from {len(self._calls[0][1])} to {rows} rows during a sequence"
        if past > self._width:
            self.problem = f"{past - self._width} tokens were in the cache before recording began"
        if self.problem:
            return
        self._width = past + width
        self._calls.append((past, tokens, ids.reshape(len(ids), rows, width, -1).transpose(1, 2, 0, 3)))

    def find(self, wanted_N: Array, row: int) -> Array | None:
        """Ids `[n, L, K]` of a row that starts with these tokens, preferably of `row`; None if there is none."""
        fed = len(wanted_N)
        if self.problem or fed > self._width:
            return None
        tokens_BT, ids_BTLK = self._joined()
        if row >= len(tokens_BT) or not np.array_equal(tokens_BT[row, :fed], wanted_N):
            rows = np.flatnonzero((tokens_BT[:, :fed] == wanted_N).all(axis=1))
            if not len(rows):
                return None
            row = int(rows[0])
        return ids_BTLK[row, :fed]

    def _joined(self) -> tuple[Array, Array]:
        if len(self._calls) > 1:
            _, tokens, ids = self._calls[0]
            width = max(past + tokens.shape[1] for past, tokens, _ in self._calls)
            tokens_BT = np.empty((len(tokens), width), tokens.dtype)
            ids_BTLK = np.empty((len(tokens), width, *ids.shape[2:]), ids.dtype)
            for past, tokens, ids in self._calls:
                tokens_BT[:, past : past + tokens.shape[1]] = tokens
                ids_BTLK[:, past : past + tokens.shape[1]] = ids
            self._calls = [(0, tokens_BT[:, : self._width], ids_BTLK[:, : self._width])]
        return self._calls[0][1:]


def fetch_calls(calls: Sequence[Call], dtype: np.dtype[np.generic]) -> None:
    """Copy ids and tokens of calls to the host, with one transfer each. Waits for their devices."""
    waiting = [call for call in calls if isinstance(call.ids_LNK, torch.Tensor)]
    ids = _fetch([call.ids_LNK for call in waiting])
    tokens = _fetch([call.tokens_BT for call in waiting])
    for call, ids_LNK, tokens_BT in zip(waiting, ids, tokens, strict=True):
        call.ids_LNK, call.tokens_BT = ids_LNK.view(dtype), tokens_BT
    for call in calls:
        call.past = int(call.past)


def _fetch(parts: Sequence[Any]) -> list[Array]:
    if not parts:
        return []
    flat = torch.cat([part.reshape(-1) for part in parts]).cpu()
    chunks = flat.split([part.numel() for part in parts])
    return [chunk.view(part.shape).numpy() for chunk, part in zip(chunks, parts, strict=True)]
