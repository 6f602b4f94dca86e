"""Experts in another order: random ones, to see how much imbalance comes from ids, and those of a renumbered model.

Contiguous homes put neighbouring ids on one rank. If hot experts have neighbouring ids, a rank is busier than in a
model whose hot experts have ids anywhere. An order `[L, E]` holds the old id of the expert with each new id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.files import read_small_text

# Beside the weights of a renumbered model.
FILE = "expert_numbering.json"
_SCHEMA = "trimtab-numbering-1"


def random_orders(num_layers: int, num_experts: int, seed: int, groups: int = 1) -> Array:
    """Random orders `[L, E]`. Those of a layer do not depend on the layers behind it.

    Args:
        groups: as in `ModelSpec.expert_groups`; experts of a group stay together.
    """
    rng = np.random.default_rng(seed)
    order_LE = np.empty((num_layers, num_experts), np.int64)
    for layer in range(num_layers):
        if groups == 1:
            order_LE[layer] = rng.permutation(num_experts)
        else:
            experts_GN = rng.permuted(np.arange(num_experts).reshape(groups, -1), axis=1)
            order_LE[layer] = experts_GN[rng.permutation(groups)].ravel()
    return order_LE


def permute_experts(counts: Array, order_LE: Array) -> Array:
    """Counts `[..., L, E]` by new ids; same dtype. All leading indices, such as sequences, get the same order."""
    permuted = np.empty_like(counts)
    for layer, order_E in enumerate(order_LE):
        permuted[..., layer, :] = counts[..., layer, order_E]
    return permuted


def permute_ids(ids_TLK: Array, order_LE: Array, no_route: int) -> Array:
    """New ids `[T, L, K]` of old ones; same dtype, `no_route` stays."""
    permuted = np.empty_like(ids_TLK)
    for layer, order_E in enumerate(order_LE):
        new_E = np.full(no_route + 1, no_route, ids_TLK.dtype)
        new_E[order_E] = np.arange(len(order_E))
        permuted[:, layer] = new_E[ids_TLK[:, layer]]
    return permuted


@dataclass(frozen=True)
class Numbering:
    """Ids of experts in a renumbered model.

    Attributes:
        first: by decoder layer, the id that each expert had at first: of new id e, `first[layer][e]`. Experts of other
            layers have their first ids.
    """

    first: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def check(self, num_experts: int) -> None:
        """Raise InputError unless it is of layers with so many experts."""
        for layer, ids in self.first.items():
            if len(ids) != num_experts:
                raise InputError(f"the numbering of layer {layer} is of {len(ids)} experts, not of {num_experts}")

    def orders(self, layers: Array, num_experts: int) -> Array:
        """First ids `[L, E]` int64 of new ones, in these decoder layers `[L]`."""
        self.check(num_experts)
        first = range(num_experts)
        return np.array([self.first.get(int(layer), first) for layer in layers], np.int64).reshape(-1, num_experts)

    def order_from(self, other: Numbering, layers: Array, num_experts: int) -> Array:
        """The order `[L, E]` that changes ids of another numbering into ids of this one."""
        new_of_first = np.argsort(other.orders(layers, num_experts), axis=1)
        return np.take_along_axis(new_of_first, self.orders(layers, num_experts), axis=1)

    def then(self, order_LE: Array, layers: Array) -> Numbering:
        """This numbering with experts in another order, of these decoder layers `[L]`."""
        first_LE = np.take_along_axis(self.orders(layers, order_LE.shape[1]), order_LE, axis=1)
        changed = dict(zip(map(int, layers), map(tuple, first_LE.tolist()), strict=True))
        identity = tuple(range(order_LE.shape[1]))
        return Numbering({layer: ids for layer, ids in ({**self.first, **changed}).items() if ids != identity})

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return {str(layer): list(ids) for layer, ids in sorted(self.first.items())}

    @classmethod
    def from_json(cls, value: Any, where: str) -> Numbering:
        """Raises InputError, which names `where`, unless every layer has each of its experts' ids once."""
        if not isinstance(value, dict):
            raise InputError(f"{where}: expected the first ids of experts by decoder layer")
        for layer, ids in value.items():
            whole = isinstance(ids, list) and all(type(each) is int for each in ids)
            if not (str(layer).isdecimal() and whole and sorted(ids) == list(range(len(ids)))):
                raise InputError(
                    f"{where}: layer {layer!r:.20} should have the ids 0 to E - 1 of its experts, each once"
                )
        return cls({int(layer): tuple(ids) for layer, ids in value.items()})

    def save(self, folder: Path) -> None:
        """Write it beside the weights of a model; nothing for first ids."""
        if self.first:
            (folder / FILE).write_text(json.dumps({"schema": _SCHEMA, "first_ids": self.to_json()}) + "\n")

    @classmethod
    def of_checkpoint(cls, folder: Path) -> Numbering:
        """The numbering of a model's folder; first ids if it has no `FILE`. Raises InputError as `from_json`."""
        if not (folder / FILE).exists():
            return cls()
        try:
            content = json.loads(read_small_text(folder / FILE))
            found = content["first_ids"] if content["schema"] == _SCHEMA else None
        except (KeyError, TypeError, ValueError, RecursionError):
            found = None
        return cls.from_json(found, str(folder / FILE))
