"""`Strategy`: what a plan changes, homes and replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Homes: as they are; improved for the loads of past steps, or of this one.
STAY, PAST, STEP = "stay", "past loads", "this step's loads"
# Replicas: none, in the node of their home, or on any node.
NONE, NEAR, ANY = "none", "in the node", "on any node"
_FROM_SIMPLE = (NONE, NEAR, ANY)


@dataclass(frozen=True)
class Strategy:
    """A choice of homes and of replicas. The default is to do nothing.

    Attributes:
        homes: `STAY`, `PAST` or `STEP`.
        replicas: `NONE`, `NEAR` or `ANY`.
        slots: most replicas of a rank.
        exposed: the part of a replica's transfers that is assumed not to overlap with compute. More of it means fewer
            replicas.
        sends: most replicas of one rank's experts that keep rows in other nodes, for each slot; 0: any number.
        move_penalty: how much a move has to improve homes, see `place_experts`; in parts per expert.
        mirror: whether weights may come from host memory.
        in_nodes: whether homes that change stay in their nodes.
    """

    homes: str = STAY
    replicas: str = NONE
    slots: int = 0
    exposed: float = 0.0
    sends: int = 0
    move_penalty: float = 0.0
    mirror: bool = False
    in_nodes: bool = False

    @property
    def name(self) -> str:
        """Its name in reports."""
        if self.replicas == NONE:
            return "nothing" if self.homes == STAY else f"re-home by {self.homes}"
        replicas = f"replicas {self.replicas}"
        return replicas if self.homes == STAY else f"re-home by {self.homes}, {replicas}"

    @property
    def complexity(self) -> tuple[int, bool]:
        """More for a strategy that does more: homes that move, replicas in the node, on any node, both."""
        return _FROM_SIMPLE.index(self.replicas), self.homes != STAY


NOTHING = Strategy()
# Names of all strategies but doing nothing.
ALL_BUT_NOTHING = frozenset(
    Strategy(homes, replicas).name for homes in (STAY, PAST, STEP) for replicas in _FROM_SIMPLE
) - {NOTHING.name}


def facts_of(strategy: Strategy, seconds: Mapping[str, float]) -> dict[str, Any]:
    """What a plan's settings say of its strategy; seconds with four digits, as they are part of the plan's hash."""
    return {"strategy": strategy.name, "predicted_s": {name: float(f"{value:.4g}") for name, value in seconds.items()}}
