"""`Strategy`: what a plan changes, homes and replicas; and `Choice`: which strategy is predicted to be fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Homes: as they are; improved for the loads of past steps, or of this one.
STAY, PAST, STEP = "stay", "past loads", "this step's loads"
# Replicas: none, in the node of their home, or on any node.
NONE, NEAR, ANY = "none", "in the node", "on any node"


@dataclass(frozen=True)
class Strategy:
    """A choice of homes and of replicas. The default is to do nothing.

    Attributes:
        homes: `STAY`, `PAST` or `STEP`.
        replicas: `NONE`, `NEAR` or `ANY`.
        slots: most replicas of a rank.
        exposed: the part of a replica's transfers that is assumed not to overlap with compute. More of it means fewer
            replicas.
        move_penalty: how much a move has to improve homes, see `place_experts`; in parts per expert.
        mirror: whether weights may come from host memory.
    """

    homes: str = STAY
    replicas: str = NONE
    slots: int = 0
    exposed: float = 0.0
    move_penalty: float = 0.0
    mirror: bool = False

    @property
    def name(self) -> str:
        """Its name in reports."""
        if self.replicas == NONE:
            return "nothing" if self.homes == STAY else f"re-home by {self.homes}"
        replicas = f"replicas {self.replicas}"
        return replicas if self.homes == STAY else f"re-home by {self.homes}, {replicas}"


NOTHING = Strategy()


@dataclass(frozen=True)
class Choice:
    """The chosen strategy and the others.

    Attributes:
        strategy: the chosen one.
        seconds: predicted seconds of a step by name of the strategy, the least first. Moves count in equal parts in the
            steps of their expected life.
        move_life: these steps.
    """

    strategy: Strategy
    seconds: dict[str, float]
    move_life: float = 1.0

    @property
    def facts(self) -> dict[str, Any]:
        """What a plan's settings say of it; seconds with four digits, as they are part of the plan's hash."""
        seconds = {name: float(f"{value:.4g}") for name, value in self.seconds.items()}
        return {"strategy": self.strategy.name, "predicted_s": seconds}

    @property
    def runner_up(self) -> str:
        """The best other strategy; "" if there is none."""
        return next((name for name in self.seconds if name != self.strategy.name), "")
