"""Traces of a session: checked copies that fit its model and a schedule; micro-steps as a trace."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner import Schedule
from trimtab.trace import RoutingTrace, hash_tokens, no_route
from trimtab.trace.numbering import Numbering


def own_trace(
    trace: RoutingTrace,
    shape: tuple[int, int],
    schedule: Schedule | None = None,
    rank: int = 0,
    num_ranks: int = 1,
    planned: Array | None = None,
) -> RoutingTrace:
    """A checked copy of a trace, whose ids the caller may overwrite. Rows with an id twice are unknown in it.

    Args:
        shape: layers and experts of the model.
        schedule: the trace has this rank's sequences of it; None if it has any sequences.
        rank, num_ranks: of the ranks that the schedule is for.
        planned: `fingerprints` of this rank's sequences; None if they were not planned by these.

    Raises:
        InputError: if the trace does not fit.
    """
    if (trace.num_layers, trace.num_experts) != shape:
        raise InputError(f"the trace has {trace.shape_text}; the model has {shape[0]} MoE layers, {shape[1]} experts")
    # The id of unknown routes is above all others, so that traces without any need one pass.
    if trace.num_tokens and trace.expert_ids.max() >= trace.num_experts:
        trace.check()
    if schedule is not None:
        mine = len(schedule.sequences_of(rank))
        if schedule.num_ranks != num_ranks or mine != trace.num_sequences:
            raise InputError(
                f"the schedule gives rank {rank} of {schedule.num_ranks} {mine} sequences; the session has "
                f"{num_ranks} ranks and this rank's trace {trace.num_sequences} sequences"
            )
    copied, repeated = trace.with_repeats_unknown()
    if repeated:
        _warn_of_repeats()
    if planned is not None:
        _check_order(copied, planned)
    return copied


def in_present_ids(trace: RoutingTrace, numbering: Numbering | None, decoder_layers: Array | None) -> RoutingTrace:
    """A trace by the ids that experts have now.

    Args:
        numbering, decoder_layers: of the session; None if nothing says that its model was renumbered, and by which
            decoder layers.

    Raises:
        InputError: if the trace or the session does not say which ids it has.
    """
    if numbering is None:
        if trace.numbering is not None and trace.numbering.first:
            raise InputError(
                "the trace is of a renumbered model, and the session is not told so; set session.numbering to that of "
                "its weights, Numbering.of_checkpoint(folder)"
            )
        return trace
    if trace.numbering is None:
        raise InputError(
            "experts were renumbered, and the trace does not say which ids recorded it; tag it with the session's "
            "numbering of that time: dataclasses.replace(trace, numbering=session.numbering)"
        )
    if decoder_layers is not None and not np.array_equal(trace.layer_indices, decoder_layers):
        raise InputError(
            f"the trace has decoder layers {trace.layer_indices.tolist()}; the session was renumbered with "
            f"{decoder_layers.tolist()}"
        )
    return trace.in_numbering(numbering)


def fingerprints(trace: RoutingTrace) -> Array:
    """`[S]` uint64 that identify the sequences of a step: hashes of their tokens, or of their ids without these."""
    prints = trace.sequence_hashes.copy()
    for index in np.flatnonzero(prints == 0):
        prints[index] = hash_tokens(trace.sequence(int(index)).reshape(-1))
    return prints


def _check_order(trace: RoutingTrace, planned: Array) -> None:
    """Raises InputError if the sequences of a trace are not the planned ones, in their order.

    Args:
        planned: `fingerprints` of this rank's sequences.
    """
    prints = fingerprints(trace)
    if len(prints) == len(planned) and (prints != planned).any():
        first = int(np.flatnonzero(prints != planned)[0])
        place = np.flatnonzero(planned == prints[first])
        where = (
            f"it was planned as number {place[0]}" if len(place) else "it was planned for another rank, or not at all"
        )
        raise InputError(
            f"sequence {first} of this rank's trace is not the planned one: {where}; the order should be that of "
            "schedule.sequences_of(rank)"
        )


@cache
def _warn_of_repeats() -> None:
    """Once in a process."""
    logging.getLogger("trimtab").warning(
        "recorded rows have an expert id twice, as rows of zeros where nothing was recorded; they are routed as the "
        "router chooses; mark them by -1 if they are no record, or check the recording"
    )


def countable_trace(trace: RoutingTrace, shape: tuple[int, int]) -> RoutingTrace:
    """As `own_trace`. Raises InputError also if the trace has no hashes, so that it can't be counted ahead."""
    own = own_trace(trace, shape)
    if (trace.sequence_hashes == 0).any():
        raise InputError("plan_ahead() needs sequence_hashes of all sequences, by which the plan finds them again")
    return own


def trace_of_micro_steps(
    rows: Sequence[npt.ArrayLike], num_layers: int, num_experts: int, unread: Sequence[npt.ArrayLike] | None = None
) -> RoutingTrace:
    """A trace, as from `own_trace`, in which each micro-step of a rank is one sequence.

    Args:
        rows: integer ids `[n, L, K]` of each micro-step; negative for unknown routes.
        unread: for each micro-step `[n]` bool, tokens whose ids are not read: their routes are unknown.

    Raises:
        InputError: if there are none, or shapes, dtypes or ids are wrong.
    """
    arrays, unknown = [np.asarray(ids) for ids in rows], no_route(num_experts)
    if not arrays:
        raise InputError("there are no micro-steps to plan; give the ids [tokens, layers, top_k] of at least one")
    for index, ids in enumerate(arrays):
        if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer) or ids.shape[1:] != arrays[0].shape[1:]:
            raise InputError(
                f"micro-step {index} has ids {list(ids.shape)} of {ids.dtype}; they should be integers "
                f"[tokens, layers, top_k], with as many layers and experts a token as micro-step 0, "
                f"{list(arrays[0].shape)}"
            )
        is_unknown = ids < 0
        if unread is not None:
            is_unknown = is_unknown | _mask_of(unread, index, len(arrays), len(ids))[:, None, None]
        if is_unknown.any():
            arrays[index] = np.where(is_unknown, unknown, ids.astype(np.int64))
        wrong = (arrays[index] >= num_experts) & (arrays[index] != unknown)
        if wrong.any():
            raise InputError(f"micro-step {index} has expert id {ids[wrong][0]}; ids should be below {num_experts}")
    trace = RoutingTrace.from_sequences(arrays, num_experts=num_experts)
    return own_trace(trace, (num_layers, num_experts))


def _mask_of(unread: Sequence[npt.ArrayLike], index: int, num_micro_steps: int, num_tokens: int) -> Array:
    """The mask `[n]` of a micro-step. Raises InputError if it does not fit."""
    if len(unread) != num_micro_steps:
        raise InputError(f"unread has {len(unread)} masks; it should have {num_micro_steps}, one for each micro-step")
    mask = np.asarray(unread[index])
    if mask.dtype != np.bool_ or mask.shape != (num_tokens,):
        raise InputError(
            f"unread of micro-step {index} is {list(mask.shape)} of {mask.dtype}; it should be [{num_tokens}] of bool, "
            "one for each of its tokens"
        )
    return mask
