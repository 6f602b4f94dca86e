"""Terminal tables for `trimtab trace info` and `trimtab plan`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

from trimtab.planner.workload import max_over_mean
from trimtab.simulator import summarise_balance
from trimtab.trace import RoutingTrace
from trimtab.trace.routing import Array
from trimtab.trace.statistics import LayerSkew

SHOWN_LAYERS = 5


def facts(rows: Iterable[tuple[str, str]], title: str) -> Table:
    """A title over names and values."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    for name, value in rows:
        table.add_row(name, value)
    return table


def skew_table(trace: RoutingTrace, skew: LayerSkew) -> Table:
    """The most uneven layers, and the mean of all."""
    table = Table(title="Most uneven layers", title_justify="left", title_style="bold")
    for column in ("decoder layer", "hottest expert / mean", "share of the busier half"):
        table.add_column(column, justify="right")
    worst = np.argsort(-skew.hottest_over_mean_L, kind="stable")[:SHOWN_LAYERS]
    for layer in worst:
        table.add_row(
            str(trace.layer_indices[layer]),
            f"{skew.hottest_over_mean_L[layer]:.2f}",
            f"{skew.busier_half_share_L[layer]:.1%}",
        )
    table.add_section()
    table.add_row("mean", f"{skew.hottest_over_mean_L.mean():.2f}", f"{skew.busier_half_share_L.mean():.1%}")
    return table


def balance_tables(trace: RoutingTrace, before_MLR: Array, after_MLR: Array) -> RenderableType:
    """max/mean of rank loads before and after planning: over all instances, and for the layers that gain most."""
    table = Table(title="Rank load, max / mean over instances", title_justify="left", title_style="bold")
    table.add_column("")
    for column in ("mean", "p50", "p99", "max"):
        table.add_column(column, justify="right")
    for name, loads_MLR in (("static", before_MLR), ("planned", after_MLR)):
        balance = summarise_balance(loads_MLR)
        table.add_row(name, *(f"{value:.3f}" for value in (balance.mean, balance.p50, balance.p99, balance.max)))
    before_L, after_L = max_over_mean(before_MLR).mean(axis=0), max_over_mean(after_MLR).mean(axis=0)
    layers = Table(title="Layers that gain most", title_justify="left", title_style="bold")
    for column in ("decoder layer", "static", "planned"):
        layers.add_column(column, justify="right")
    for layer in np.argsort(after_L - before_L, kind="stable")[:SHOWN_LAYERS]:
        layers.add_row(str(trace.layer_indices[layer]), f"{before_L[layer]:.3f}", f"{after_L[layer]:.3f}")
    return Group(table, layers)
