"""Imbalance of every instance, with and without a plan: pictures for papers (matplotlib) and tidy tables (pandas)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from trimtab.analysis.balance import max_over_mean_or_nan
from trimtab.array_type import Array
from trimtab.errors import InputError, install

KINDS = ("layers", "heatmap", "cdf")
LABEL = "max/mean of rank loads"
# Inches: a column of a paper.
SIZE = (3.4, 2.3)


@dataclass(frozen=True, eq=False)
class Imbalance:
    """Rows of every rank in every instance. M may differ between plans.

    Attributes:
        loads: `[M, L, R]` rows, (token, expert) pairs, by name of the plan; the first is the one without replicas.
        layer_indices: `[L]` the decoder layer of each MoE layer.
        steps: `[M]` RL step of each micro-step, or one step for all; by name where plans differ in it.
        top_k: experts of a token.
    """

    loads: Mapping[str, Array]
    layer_indices: Array
    steps: Array | int | Mapping[str, Array]
    top_k: int

    def max_over_mean(self, name: str) -> Array:
        """`[M, L]` float64, NaN where an instance has no load."""
        return max_over_mean_or_nan(self.loads[name])

    def to_pandas(self) -> Any:
        """A table with a row for each instance: `plan`, `step`, `micro_step`, `layer`, `tokens`, `rows` (tokens times
        top-k), `busiest_rank`, `max_over_mean`.

        Raises:
            InputError: if pandas is not installed.
        """
        pandas = need("pandas")
        frames = []
        for name, loads_MLR in self.loads.items():
            micro_steps, layers, _ = loads_MLR.shape
            steps = self.steps[name] if isinstance(self.steps, Mapping) else self.steps
            columns = {
                "plan": name,
                "step": np.repeat(np.broadcast_to(steps, micro_steps), layers),
                "micro_step": np.repeat(np.arange(micro_steps), layers),
                "layer": np.tile(self.layer_indices, micro_steps),
                "tokens": loads_MLR.sum(axis=-1).ravel() // self.top_k,
                "rows": loads_MLR.sum(axis=-1).ravel(),
                "busiest_rank": loads_MLR.argmax(axis=-1).ravel(),
                "max_over_mean": self.max_over_mean(name).ravel(),
            }
            frames.append(pandas.DataFrame(columns))
        return pandas.concat(frames, ignore_index=True)

    def plot(self, kind: str, ax: Any = None) -> Any:
        """Draw one of `KINDS` into the Axes, or into a new figure of the width of a column. Returns the Axes.

        Raises:
            InputError: if there is no such kind, or matplotlib is not installed.
        """
        if kind not in KINDS:
            raise InputError(f"kind: invalid choice: {kind!r} (choose from {', '.join(KINDS)})")
        pyplot = need("matplotlib.pyplot")
        if ax is None:
            ax = pyplot.subplots(figsize=SIZE, layout="constrained")[1]
        {"layers": self._layers, "heatmap": self._heatmap, "cdf": self._cdf}[kind](ax)
        return ax

    def _layers(self, ax: Any) -> None:
        """Mean over micro-steps by layer, and the range of the middle nine tenths."""
        for name in self.loads:
            found_ML = self.max_over_mean(name)
            known_L = ~np.isnan(found_ML).all(axis=0)
            layers, shown_ML = self.layer_indices[known_L], found_ML[:, known_L]
            (line,) = ax.plot(layers, np.nanmean(shown_ML, axis=0), marker=".", label=name)
            low, high = np.nanquantile(shown_ML, (0.05, 0.95), axis=0) if len(layers) else ([], [])
            ax.fill_between(layers, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        ax.set(xlabel="decoder layer", ylabel=LABEL, ylim=(1, None))
        ax.xaxis.get_major_locator().set_params(integer=True)
        self._legend(ax)

    def _heatmap(self, ax: Any) -> None:
        """The first plan, micro-steps to the right and layers downward."""
        name = next(iter(self.loads))
        image = ax.imshow(self.max_over_mean(name).T, aspect="auto", interpolation="none", vmin=1, cmap="magma_r")
        places = np.arange(0, len(self.layer_indices), -(-len(self.layer_indices) // 8))
        ax.set_yticks(places, [str(layer) for layer in self.layer_indices[places]])
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set(xlabel="micro-step", ylabel="decoder layer")
        ax.figure.colorbar(image, ax=ax, label=LABEL)

    def _cdf(self, ax: Any) -> None:
        """The part of the instances at or below each max/mean."""
        for name in self.loads:
            found = np.sort(self.max_over_mean(name).ravel())
            found = found[~np.isnan(found)]
            ax.step(found, np.arange(1, len(found) + 1) / max(1, len(found)), where="post", label=name)
        ax.set(xlabel=LABEL, ylabel="part of the instances", ylim=(0, 1.02))
        self._legend(ax)

    def _legend(self, ax: Any) -> None:
        if len(self.loads) > 1:
            ax.legend(frameon=False, fontsize="small")


def need(module: str) -> Any:
    """The module. Raises InputError with the extra to install if it is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        name = module.partition(".")[0]
        if error.name != name:
            raise
        raise InputError(f"{name} is not installed; {install('plot')}") from None
