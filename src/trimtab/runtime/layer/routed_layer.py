"""`RoutedLayer`: what all kinds of a session's MoE layers share: their home experts, and replay of the routing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.layer.instance import LayerCalls
from trimtab.runtime.state.home_experts import HomeExperts


class RoutedLayer:
    """A MoE layer of a session.

    Attributes:
        homes: this rank's experts of the layer.
    """

    def __init__(self, calls: LayerCalls, homes: HomeExperts) -> None:
        self.homes = homes
        self._calls = calls

    def __deepcopy__(self, _memo: object) -> RoutedLayer:
        raise InputError("a model whose experts are in a session can't be copied; copy it before a session gets them")

    @property
    def index(self) -> int:
        """The layer's number among the session's layers, 0 .. L-1."""
        return self.homes.index

    @property
    def replays(self) -> bool:
        """Whether a call of this layer now uses recorded routing."""
        routes = self._calls.routes()
        return routes is not None and routes.replays

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The Parameters of this rank's home experts, read now; those of lists one after another."""
        return self.homes.parameters

    @property
    def home_experts(self) -> Array:
        """Logical ids `[E / R]` of this rank's home experts, in the order of rows in the tensors."""
        return self.homes.home_experts

    def route(self, live_ids: torch.Tensor) -> torch.Tensor:
        """Replace the router's ids by the recorded ones, if the micro-step has any.

        Call it after the router has chosen ids and before weights are computed from its logits for these ids.

        Args:
            live_ids: `[T, K]` integers, the router's choice.

        Returns:
            `[T, K]` int64, the ids for the weights and for calling the layer.
        """
        if live_ids.ndim != 2:
            raise InputError(f"MoE layer {self.index}: route() was given ids {list(live_ids.shape)}, not [T, K]")
        routes, ids = self._calls.routes(), live_ids.to(torch.int64)
        if routes is None:
            return ids
        ids = routes.replay(self.index, ids)
        routes.routed[self.index] = mark(ids)
        return ids


def mark(ids: torch.Tensor) -> tuple[int, int]:
    """Address and version of ids."""
    return ids.data_ptr(), -1 if ids.is_inference() else ids._version
