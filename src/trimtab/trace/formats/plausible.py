"""What recorded routes tell of themselves: rows that no router chose, tokens that are recorded twice, and prompts whose
routes differ from answer to answer. All of it is well-formed, so it is imported, and noted."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from trimtab.array_type import Array
from trimtab.trace.routing import no_route

# A smaller part of rows or sequences is not worth a note: repeated rows up to 5% change no figure that is printed.
LEAST_PART = 0.01
# Sums in another order change some routes of a prompt.
LEAST_AGREEMENT = 0.95
# Rows that a model can choose, below which equal ones may be by chance; and tokens of an answer, below which equal ones
# may be, too.
LEAST_ROWS, LEAST_ANSWER = 1e9, 32
# So many rows of a prompt, evenly chosen, are compared with those of other answers, while so many bytes of them are
# kept; and tokens with each other up to so many, since 8 bytes of each are kept.
PROMPT_ROWS, PROMPT_BYTES, MOST_TOKENS = 32, 32 << 20, 1 << 22
# Odd, so that no token is lost in the product.
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class Plausibility:
    """Counts of what is odd in the sequences of a dump, one `add` for each.

    Attributes:
        least_answer: tokens of an answer that counts when it equals another.
        rows: with a route, where so many are possible that equal ones are not by chance.
        repeated: rows that equal the row before in all layers, or are 0 to K-1 in all of them.
        prompt_routes, agreeing: routes of prompts that can be compared with those of another answer, and those that are
            equal.
    """

    least_answer: int = LEAST_ANSWER
    rows: int = 0
    repeated: int = 0
    prompt_routes: int = 0
    agreeing: int = 0
    _prefixes: list[Array] = field(default_factory=list)
    _is_long: list[bool] = field(default_factory=list)
    _tokens: int = 0
    _prompts: OrderedDict[tuple[int, int], Array] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def add(
        self, routes_TLK: Array, num_experts: int, token_ids: Array | None, prompt: tuple[int, int], prompt_length: int
    ) -> Array:
        """Count a sequence.

        Args:
            routes_TLK: in the order in which they were recorded, `no_route(num_experts)` where unknown.
            token_ids: `[T]` or one more; None if unknown.
            prompt: step and hash of the prompt, 0 if unknown.
            prompt_length: its tokens.

        Returns:
            `[T]` bool, the rows that count as repeated.
        """
        layers, top_k = routes_TLK.shape[1:]
        is_known_T = (routes_TLK[..., 0] != no_route(num_experts)).any(axis=1)
        is_known_T &= layers * math.log(math.comb(num_experts, top_k)) > math.log(LEAST_ROWS)
        is_repeat_T = np.zeros(len(routes_TLK), bool)
        is_repeat_T[1:] = _equal_rows(routes_TLK[1:], routes_TLK[:-1])
        if top_k > 1:
            is_repeat_T |= _equal_rows(routes_TLK, np.broadcast_to(np.arange(top_k), routes_TLK.shape))
        is_repeat_T &= is_known_T
        self.rows += int(is_known_T.sum())
        self.repeated += int(is_repeat_T.sum())
        if token_ids is not None and len(token_ids) and self._tokens < MOST_TOKENS:
            self._prefixes.append(prefix_hashes(token_ids))
            self._tokens += len(token_ids)
            self._is_long.append(len(token_ids) - prompt_length >= self.least_answer)
        if prompt[1] and 0 < prompt_length <= len(routes_TLK):
            self._compare(prompt, routes_TLK[:prompt_length], no_route(num_experts))
        return is_repeat_T

    def _compare(self, prompt: tuple[int, int], routes_PLK: Array, unknown: int) -> None:
        chosen = np.linspace(0, len(routes_PLK) - 1, min(PROMPT_ROWS, len(routes_PLK))).astype(np.int64)
        this_PLK = np.sort(routes_PLK[chosen])
        first_PLK = self._prompts.get(prompt)
        is_known_PL = this_PLK[..., 0] != unknown
        if first_PLK is not None and first_PLK.shape == this_PLK.shape:
            is_first_PL = first_PLK[..., 0] != unknown
            equal_PL = (first_PLK == this_PLK).all(axis=-1)
            self.prompt_routes += int((is_known_PL & is_first_PL).sum())
            self.agreeing += int((equal_PL & is_known_PL & is_first_PL).sum())
            if is_known_PL.sum() <= is_first_PL.sum():
                return
        elif first_PLK is None:
            self._bytes += this_PLK.nbytes
        self._prompts[prompt] = this_PLK
        while self._bytes > PROMPT_BYTES:
            self._bytes -= self._prompts.popitem(last=False)[1].nbytes

    def _beginnings(self) -> tuple[int, int]:
        """Sequences that are the beginning of a longer one, and long answers that are recorded once more."""
        ends = np.array([prefix_T[-1] for prefix_T in self._prefixes], np.uint64)
        every = np.sort(np.concatenate([np.empty(0, np.uint64), *self._prefixes]))
        in_all = np.searchsorted(every, ends, "right") - np.searchsorted(every, ends, "left")
        _, which, as_end = np.unique(ends, return_inverse=True, return_counts=True)
        long = ends[np.array(self._is_long, bool)]
        return int((in_all > as_end[which]).sum()), len(long) - len(np.unique(long))

    def notes(self, *, dropped: bool = False) -> Iterator[str]:
        """A sentence for each thing that a reader of figures should know.

        Args:
            dropped: repeated rows are not among the routes.
        """
        if self.repeated > LEAST_PART * self.rows and not dropped:
            yield (
                f"{self.repeated / self.rows:.0%} of the rows repeat the row before in all layers, or are 0 to K-1: no "
                "router chose them, as in warm-up, profiling or padding; --drop-repeats takes their routes as unknown."
            )
        sequences = len(self._prefixes)
        within, again = self._beginnings()
        if within > LEAST_PART * sequences:
            yield (
                f"{within:,} of {sequences:,} sequences are the beginning of another, such as turns of a conversation: "
                "their tokens count more than once; --merge-turns keeps the longest."
            )
        if again > LEAST_PART * sequences:
            yield f"{again:,} of {sequences:,} sequences have the same tokens as another; they count more than once."
        if self.agreement is not None and self.agreement < LEAST_AGREEMENT:
            yield (
                f"Prompts' routes agree in {self.agreement:.1%} between answers to the same prompt; they should be "
                "nearly the same, unless weights changed between them."
            )

    @property
    def agreement(self) -> float | None:
        """Part of the compared routes of prompts that are equal; None if there are none."""
        return self.agreeing / self.prompt_routes if self.prompt_routes else None


def prefix_hashes(token_ids: Array) -> Array:
    """`[T]` uint64: of the first token, the first two, and so on."""
    powers_T = np.multiply.accumulate(np.full(len(token_ids), _BASE))
    return np.cumsum((token_ids.astype(np.uint64) + np.uint64(1)) * powers_T, dtype=np.uint64)


def _equal_rows(one_TLK: Array, other_TLK: Array) -> Array:
    """`[T]` bool, rows that are equal in all layers."""
    # Nearly all differ in the first layer.
    is_equal_T: Array = (one_TLK[:, 0] == other_TLK[:, 0]).all(axis=1)
    found = np.flatnonzero(is_equal_T)
    is_equal_T[found] = (one_TLK[found] == other_TLK[found]).all(axis=(1, 2))
    return is_equal_T
