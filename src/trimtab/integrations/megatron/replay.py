"""Replay of recorded routing in Megatron's routers, and their live choice for balanced live calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.runtime.layer.framework_layer import FrameworkLayer
from trimtab.runtime.layer.micro_step import BoundRoutes

_OWN = ("plain", "_layer", "_is_replaying", "_taken")
Taken = tuple[torch.Tensor | None, BoundRoutes | None]
ComputeTopk = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class SessionReplay:
    """Takes the place of a router's `RouterReplay`: recorded experts in planned micro-steps, with the router's own
    scores for them; else what the router would do without it.

    Args:
        plain: the user's `RouterReplay`; None if routing replay is not enabled.
        is_replaying: whether the session replays now.
    """

    def __init__(self, layer: FrameworkLayer, plain: Any, is_replaying: Callable[[], bool]) -> None:
        self.plain = plain
        self._layer, self._is_replaying = layer, is_replaying
        # Experts and routes of the router's last call; in a list, since attributes take long here.
        self._taken: list[Taken] = [(None, None)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Frameworks, and newer versions of Megatron, write to what they find in the router.
        owner = self if name in _OWN or self.plain is None else self.plain
        object.__setattr__(owner, name, value)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: ComputeTopk | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and experts `[T, K]` of each token, as `RouterReplay.get_replay_topk`."""
        assert default_compute_topk is not None
        routes = self._layer.routes()
        self._taken[0] = None, routes
        if routes is None or not routes.replays or not self._is_replaying():
            found: tuple[torch.Tensor, torch.Tensor]
            if self.plain is not None:
                found = self.plain.get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
            else:
                found = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            if routes is not None and routes.live is not None:
                self._taken[0] = found[1].to(torch.int64), routes
            return found
        ids = self._layer.recorded_ids(routes, scores.shape[0], topk)
        if ids is None:
            with torch.no_grad():
                _, live_ids = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            ids = self._layer.route(live_ids)
        self._taken[0] = ids, routes
        return scores.gather(1, ids), ids

    def take(self) -> Taken:
        """The experts `[T, K]` of the router's last call, None if the session neither replays nor balances it; and the
        routes of the call, None if there was none or it is outside of micro-steps."""
        taken, self._taken[0] = self._taken[0], (None, None)
        return taken
