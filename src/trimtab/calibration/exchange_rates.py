"""Rates of the runtime's all-to-all of rows, between the ranks of a node and between nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from trimtab.calibration.fits import Fit, fit_rates
from trimtab.calibration.measurement_context import MeasurementContext
from trimtab.runtime.rows.exchange import exchange_rows

# Rows sent by a rank, as fractions of the rows that a layer dispatches.
LOADS = (1.0, 0.5, 0.125, 1 / 64)


@dataclass(frozen=True)
class ExchangeFits:
    """Fits of all-to-all times: `rates[0]` bytes per second to and from other ranks, `fixed_s[0]` per all-to-all.

    Attributes:
        near: between ranks of a node; None if a node has one rank.
        far: between nodes; None if there is one node.
    """

    near: Fit | None
    far: Fit | None


def measure_exchange(context: MeasurementContext) -> ExchangeFits:
    """Time all-to-alls with even splits over the ranks of the node, and over those of other nodes. Collective."""
    ranks, per_node, rank = context.topology.num_ranks, context.topology.ranks_per_node, context.topology.rank
    on_node = np.arange(ranks) // per_node == rank // per_node
    return ExchangeFits(
        near=_measure(context, on_node.tolist()) if per_node > 1 else None,
        far=_measure(context, (~on_node).tolist()) if per_node < ranks else None,
    )


def _measure(context: MeasurementContext, is_destination: list[bool]) -> Fit:
    """Fit all-to-alls in which this rank sends rows to some ranks only."""
    most = context.tokens * context.model.top_k
    each = [max(1, round(fraction * most / sum(is_destination))) for fraction in LOADS]
    taken_s = context.seconds({f"{rows} rows": _exchange(context, rows, is_destination) for rows in each})
    others = sum(is_destination) - is_destination[context.topology.rank]
    nbytes = np.array(each)[:, None] * others * context.model.hidden_size * context.dtype.itemsize
    return fit_rates(nbytes, np.ones((len(each), 1)), np.zeros(len(each)), np.array(list(taken_s.values())))


def _exchange(context: MeasurementContext, rows_each: int, is_destination: list[bool]) -> Callable[[], object]:
    splits = [rows_each * sends for sends in is_destination]
    rows = context.random(sum(splits), context.model.hidden_size)
    return partial(exchange_rows, rows, splits, splits, context.topology.experts)
