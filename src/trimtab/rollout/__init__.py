"""Rollouts whose attention and experts are on different ranks. Names are imported when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.rollout.disaggregated_rollout import DisaggregatedRollout, Generated, disaggregate

__all__ = ["DisaggregatedRollout", "Generated", "disaggregate"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.disaggregated_rollout"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
