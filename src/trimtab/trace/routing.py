"""`RoutingTrace`: the experts that every token of every sequence used, in every MoE layer; and `SequenceFacts`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.figures import plural
from trimtab.kernels import kernel
from trimtab.trace.numbering import Numbering, permute_ids

Windows = tuple[tuple[int, int], ...]
"""Windows of one sequence, `(version, rows)` each; none if all rows are of the same version."""


def windows_array(windows: Iterable[Windows]) -> Array:
    """`[S]`, an array of the windows of each sequence."""
    return np.fromiter(windows, object)


def check_windows(windows: Windows, sequence: int, length: int) -> None:
    """Raise InputError if windows have not the rows of their sequence."""
    rows = [rows for _, rows in windows]
    if min(rows) < 1 or sum(rows) != length:
        raise InputError(f"sequence {sequence} has {length} tokens; its windows have {rows}")


@dataclass(frozen=True, eq=False)
class SequenceFacts:
    """Facts of the S sequences of a trace except their routes; see `RoutingTrace`.

    Attributes:
        lengths: `[S]` int64, routed tokens.
        prompt_lengths: `[S]` int32.
        steps: `[S]` int32.
        sequence_hashes: `[S]` uint64.
        prompt_hashes: `[S]` uint64.
        domains: `[S]` str.
        windows: `[S]` tuples.
    """

    lengths: Array
    prompt_lengths: Array
    steps: Array
    sequence_hashes: Array
    prompt_hashes: Array
    domains: Array
    windows: Array

    def select(self, chosen: Array | slice) -> SequenceFacts:
        """The facts of some sequences: `[S]` bool, indices, or a slice."""
        return SequenceFacts(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def joined(self, *others: SequenceFacts) -> SequenceFacts:
        """The facts of these sequences, followed by those of the others."""
        parts = (self, *others)
        return SequenceFacts(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(self)))


# Names that `RoutingTrace` has, too.
_FACTS = [field.name for field in fields(SequenceFacts) if field.name != "lengths"]


def id_dtype(num_experts: int) -> np.dtype[Any]:
    """The dtype of expert ids: uint8 up to 255 experts, else uint16 (the largest value is kept for "no route")."""
    if not 1 <= num_experts <= 65535:
        raise InputError(f"num_experts is {num_experts}; expert ids hold 1 to 65535 experts")
    return np.dtype(np.uint8 if num_experts <= 255 else np.uint16)


def no_route(num_experts: int) -> int:
    """The id of an unknown route: the largest value of `id_dtype`."""
    return int(np.iinfo(id_dtype(num_experts)).max)


def hash_tokens(token_ids: npt.ArrayLike) -> int:
    """A 64-bit hash of a sequence's token ids, which identifies the sequences of a planned batch. 0 means unknown."""
    tokens = np.ascontiguousarray(token_ids, dtype="<i8")
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little") or 1


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Routing of S sequences with T routed tokens in all, through L MoE layers with top-K routing over E experts.

    A sequence has one row per token *fed* to the model. The last token that a rollout generates is never fed, has no
    route and no row. Only the set of a token's ids matters, not their order.

    Attributes:
        expert_ids: `[T, L, K]`, uint8 (E <= 255) or uint16; logical ids, `no_route(E)` in all K places if unknown.
        sequence_starts: `[S + 1]` int64; sequence s owns rows `sequence_starts[s]:sequence_starts[s + 1]`.
        prompt_lengths: `[S]` int32; number of rows that belong to the prompt.
        steps: `[S]` int32; the RL step that the sequence was generated for.
        sequence_hashes: `[S]` uint64; `hash_tokens` of the sequence's token ids, 0 where unknown.
        prompt_hashes: `[S]` uint64; `hash_tokens` of the prompt's token ids, the same for all answers to it; 0 where
            unknown.
        domains: `[S]` str; kind of prompt, such as its data set's name, "" where unknown.
        windows: `[S]`; for a sequence that was generated over several steps, the windows of its rows, in order: pairs
            of the version of the weights that fed the rows first, which is the RL step, and the number of rows. Empty
            for a sequence of one version.
        layer_indices: `[L]` int32; the decoder layer behind each MoE layer.
        num_experts: E.
        model: the model's name or type, for people.
        sampled: the part of each step's sequences that was recorded, above 0 to 1.
        numbering: of the model that recorded the ids; None if unknown.
        notes: sentences on what was odd when the routes were imported.

    Raises:
        InputError: if shapes or dtypes don't fit together. `check` checks the ids.
    """

    expert_ids: Array
    sequence_starts: Array
    prompt_lengths: Array
    steps: Array
    sequence_hashes: Array
    prompt_hashes: Array
    domains: Array
    windows: Array
    layer_indices: Array
    num_experts: int
    model: str = ""
    sampled: float = 1.0
    numbering: Numbering | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ids = self.expert_ids
        if ids.ndim != 3:
            raise InputError(f"expert_ids has shape {ids.shape}; it should be [tokens, layers, top_k]")
        if ids.dtype != id_dtype(self.num_experts):
            raise InputError(
                f"expert_ids is {ids.dtype}; for {self.num_experts} experts it should be {id_dtype(self.num_experts)}"
            )
        if not 1 <= ids.shape[2] <= self.num_experts:
            raise InputError(f"top_k is {ids.shape[2]}; it should be 1 to the number of experts, {self.num_experts}")
        starts = self.sequence_starts
        if len(starts) == 0 or starts[0] != 0 or starts[-1] != len(ids) or np.any(np.diff(starts) < 0):
            raise InputError(f"sequence_starts should rise from 0 to the number of tokens, {len(ids)}")
        for name in _FACTS:
            if len(getattr(self, name)) != self.num_sequences:
                raise InputError(
                    f"{name} has {len(getattr(self, name))} entries; there are {self.num_sequences} sequences"
                )
        for index in np.flatnonzero(self.windows):
            check_windows(self.windows[index], int(index), int(starts[index + 1] - starts[index]))
        if len(self.layer_indices) != ids.shape[1]:
            raise InputError(f"layer_indices names {len(self.layer_indices)} layers; expert_ids has {ids.shape[1]}")
        if self.numbering is not None:
            self.numbering.check(self.num_experts)

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[npt.ArrayLike],
        *,
        num_experts: int,
        shape: tuple[int, int] | None = None,
        layer_indices: npt.ArrayLike | None = None,
        prompt_lengths: npt.ArrayLike | None = None,
        steps: npt.ArrayLike | int = 0,
        sequence_hashes: npt.ArrayLike | None = None,
        prompt_hashes: npt.ArrayLike | None = None,
        domains: npt.ArrayLike | str = "",
        windows: Iterable[Windows] | None = None,
        model: str = "",
        sampled: float = 1.0,
    ) -> RoutingTrace:
        """Join per-sequence ids `[t_s, L, K]` into one trace.

        Args:
            shape: `(L, K)`, needed only where there may be no sequence at all.
        """
        dtype = id_dtype(num_experts)
        arrays = [np.asarray(ids, dtype) for ids in sequences]
        count = len(arrays)
        if shape is None:
            if not arrays:
                raise InputError("a trace without sequences needs its shape (layers, top_k)")
            shape = arrays[0].shape[1:]
        return cls(
            expert_ids=np.concatenate([np.empty((0, *shape), dtype), *arrays]),
            sequence_starts=np.concatenate([[0], np.cumsum([len(ids) for ids in arrays])]).astype(np.int64),
            prompt_lengths=np.asarray(np.zeros(count) if prompt_lengths is None else prompt_lengths, np.int32),
            steps=np.broadcast_to(np.asarray(steps, np.int32), (count,)).copy(),
            sequence_hashes=np.asarray(np.zeros(count) if sequence_hashes is None else sequence_hashes, np.uint64),
            prompt_hashes=np.asarray(np.zeros(count) if prompt_hashes is None else prompt_hashes, np.uint64),
            domains=np.broadcast_to(np.asarray(domains, np.str_), (count,)).copy(),
            windows=windows_array([()] * count if windows is None else windows),
            layer_indices=np.asarray(np.arange(shape[0]) if layer_indices is None else layer_indices, np.int32),
            num_experts=num_experts,
            model=model,
            sampled=sampled,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.expert_ids)

    @property
    def num_layers(self) -> int:
        return int(self.expert_ids.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.expert_ids.shape[2])

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_starts) - 1

    @property
    def sequence_lengths(self) -> Array:
        """`[S]` int64: routed tokens of each sequence."""
        return np.diff(self.sequence_starts)

    @property
    def no_route(self) -> int:
        return no_route(self.num_experts)

    def sequence(self, index: int) -> Array:
        """Expert ids `[t, L, K]` of one sequence, a view."""
        return self.expert_ids[self.sequence_starts[index] : self.sequence_starts[index + 1]]

    def row_versions(self, index: int) -> Array:
        """`[t]` int32: the version of the weights that fed each row of one sequence first."""
        windows = self.windows[index] or ((int(self.steps[index]), int(self.sequence_lengths[index])),)
        versions, rows = zip(*windows, strict=True)
        return np.repeat(np.array(versions, np.int32), rows)

    def select(self, sequences: npt.ArrayLike) -> RoutingTrace:
        """The trace of the given sequences, `[N]` indices, in the given order."""
        chosen = np.asarray(sequences, np.int64)
        rows = [self.sequence(int(index)) for index in chosen]
        return self.with_sequences(self.facts.select(chosen), np.concatenate([self.expert_ids[:0], *rows]))

    def shared(self, chosen: Array) -> RoutingTrace:
        """The trace of some sequences, ascending indices `[N]`, that nobody writes to: consecutive ones are views."""
        if len(chosen) and chosen[-1] - chosen[0] == len(chosen) - 1:
            return self.part(int(chosen[0]), int(chosen[-1]) + 1)
        return self.select(chosen)

    def part(self, first: int, end: int) -> RoutingTrace:
        """The trace of sequences `first` to `end - 1`. Its arrays are views."""
        ids_TLK = self.expert_ids[self.sequence_starts[first] : self.sequence_starts[end]]
        return self.with_sequences(self.facts.select(slice(first, end)), ids_TLK)

    @property
    def facts(self) -> SequenceFacts:
        """What is known of each sequence except its routes."""
        return SequenceFacts(self.sequence_lengths, *(getattr(self, name) for name in _FACTS))

    def with_sequences(self, facts: SequenceFacts, ids_TLK: Array) -> RoutingTrace:
        """The trace of other sequences of the same model, with these facts and ids `[T, L, K]`."""
        return replace(
            self,
            expert_ids=ids_TLK,
            sequence_starts=np.concatenate([[0], np.cumsum(facts.lengths)]).astype(np.int64),
            **{name: getattr(facts, name) for name in _FACTS},
        )

    def check_same_model(self, other: RoutingTrace) -> None:
        """Raise InputError if another trace differs in layers, top_k, experts or their numbering."""
        if (other.num_experts, other.top_k) != (self.num_experts, self.top_k) or not np.array_equal(
            other.layer_indices, self.layer_indices
        ):
            raise InputError(f"traces of different models can't be joined: {self.shape_text}; {other.shape_text}")
        if (other.numbering or Numbering()) != (self.numbering or Numbering()):
            raise InputError("traces of different expert numberings can't be joined; trimtab trace renumber maps one")

    @staticmethod
    def concatenate(traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """The sequences of several traces of one model, one after another.

        Raises:
            InputError: if the traces differ in layers, top_k, experts, their numbering or the sampled part.
        """
        first = traces[0]
        for other in traces[1:]:
            first.check_same_model(other)
            if other.sampled != first.sampled:
                raise InputError(f"traces of other sampled parts can't be joined: {first.sampled:g}; {other.sampled:g}")
        facts = first.facts.joined(*(trace.facts for trace in traces[1:]))
        joined = first.with_sequences(facts, np.concatenate([trace.expert_ids for trace in traces]))
        return replace(joined, notes=joined_notes(traces))

    def permuted(self, order_LE: Array) -> RoutingTrace:
        """The trace as if the experts of every layer had their ids in another order, `[L, E]` old ids by new ones."""
        return replace(self, expert_ids=permute_ids(self.expert_ids, order_LE, self.no_route))

    def in_numbering(self, numbering: Numbering) -> RoutingTrace:
        """The same routes by the ids that the model's experts have in another numbering."""
        order_LE = numbering.order_from(self.numbering or Numbering(), self.layer_indices, self.num_experts)
        return replace(self.permuted(order_LE), numbering=numbering)

    def __repr__(self) -> str:
        steps = f"{self.steps.min()} to {self.steps.max()}" if self.num_sequences else "none"
        named = f", {self.model}" if self.model else ""
        size = f"{plural(self.num_sequences, 'sequence')}, {plural(self.num_tokens, 'token')}"
        return f"RoutingTrace({size}, {self.shape_text}, steps {steps}{named})"

    @property
    def shape_text(self) -> str:
        layers, experts = plural(self.num_layers, "MoE layer"), plural(self.num_experts, "expert")
        return f"{layers}, {experts}, top-{self.top_k}"

    def check(self) -> None:
        """Check every id.

        Raises:
            InputError: naming the first bad token, if an id is out of range, twice in a row of top_k, or unknown in
                only part of a row.
        """
        rows_NK = self.expert_ids.reshape(-1, self.top_k)
        row = int(_first_bad_row(rows_NK, self.num_experts, np.int64(self.no_route)))
        if row >= 0:
            token, layer = divmod(row, self.num_layers)
            raise InputError(
                f"token {token} in MoE layer {layer} has expert ids "
                f"{self.expert_ids[token, layer].tolist()}; they should be distinct and below {self.num_experts}, "
                f"or all {self.no_route} where the route is unknown"
            )

    def with_repeats_unknown(self) -> tuple[RoutingTrace, int]:
        """The trace with a copy of the ids, in which rows with an id twice are unknown, and the number of these rows.

        No router chooses an expert twice. Frameworks fill rows without a record with zeros.
        """
        ids = self.expert_ids.copy()
        count = _forget_repeats(ids.reshape(-1, self.top_k), np.int64(self.no_route))
        return replace(self, expert_ids=ids), int(count)


@kernel
def _forget_repeats(ids_NK, no_route):  # type: ignore[no-untyped-def]
    """Let rows with an id twice be unknown. Returns the number of those that were not."""
    count = 0
    for n in range(ids_NK.shape[0]):
        if ids_NK[n, 0] == no_route:
            continue
        is_repeated = False
        for k in range(1, ids_NK.shape[1]):
            for earlier in range(k):
                is_repeated |= ids_NK[n, earlier] == ids_NK[n, k]
        if is_repeated:
            count += 1
            ids_NK[n] = no_route
    return count


@kernel
def _first_bad_row(ids_NK, num_experts, no_route):  # type: ignore[no-untyped-def]
    for n in range(ids_NK.shape[0]):
        unknown = 0
        for k in range(ids_NK.shape[1]):
            expert = ids_NK[n, k]
            if expert == no_route:
                unknown += 1
                continue
            if expert >= num_experts:
                return n
            for earlier in range(k):
                if ids_NK[n, earlier] == expert:
                    return n
        if unknown != 0 and unknown != ids_NK.shape[1]:
            return n
    return -1


def joined_notes(traces: Iterable[RoutingTrace]) -> tuple[str, ...]:
    """The notes of several traces, each once."""
    return tuple(dict.fromkeys(note for trace in traces for note in trace.notes))
