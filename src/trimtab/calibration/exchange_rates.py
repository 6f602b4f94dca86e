"""How fast is the all-to-all? The runtime's own exchange of rows, inside the node and between nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trimtab.calibration.fits import Fit, fit_rates
from trimtab.calibration.site import Site
from trimtab.runtime.rows.exchange import exchange_rows

# Parts of the rows that a rank sends in a layer, all tokens to all their experts.
LOADS = (1.0, 0.5, 0.125, 1 / 64)


@dataclass(frozen=True)
class ExchangeFigures:
    """What an all-to-all costs.

    Attributes:
        near, far: `rates[0]` bytes a second to and from other ranks, `fixed_s[0]` of an all-to-all; inside the node and
            between nodes, None where there are no such ranks.
    """

    near: Fit | None
    far: Fit | None


def measure_exchange(site: Site) -> ExchangeFigures:
    """Time all-to-alls with even splits over the ranks of the node, and over those of other nodes. Collective."""
    ranks, per_node, rank = site.topology.num_ranks, site.topology.ranks_per_node, site.topology.rank
    here = np.arange(ranks) // per_node == rank // per_node
    return ExchangeFigures(
        near=_measure(site, here.tolist()) if per_node > 1 else None,
        far=_measure(site, (~here).tolist()) if per_node < ranks else None,
    )


def _measure(site: Site, takes_part: list[bool]) -> Fit:
    """All-to-alls in which this rank has rows for some ranks."""
    most = site.tokens * site.model.top_k
    each = [max(1, round(part * most / sum(takes_part))) for part in LOADS]
    taken = site.medians({f"{rows} rows": _variant(site, rows, takes_part) for rows in each})
    others = sum(takes_part) - takes_part[site.topology.rank]
    nbytes = [rows * others * site.model.hidden_size * site.dtype.itemsize for rows in each]
    seconds_P = np.array([figures["s"] for figures in taken.values()])
    return fit_rates(np.array(nbytes)[:, None], np.ones((len(each), 1)), np.zeros(len(each)), seconds_P)


def _variant(site: Site, rows_each: int, takes_part: list[bool]) -> Callable[[], dict[str, float]]:
    splits = [rows_each * takes for takes in takes_part]
    rows = site.random(sum(splits), site.model.hidden_size)

    def run() -> dict[str, float]:
        start = site.begin()
        exchange_rows(rows, splits, splits, site.topology.experts)
        return {"s": site.clock.seconds(start, site.clock.now())}

    return run
