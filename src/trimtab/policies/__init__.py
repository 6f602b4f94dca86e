"""All balancers with one protocol: a `View` of the permitted data in, a `StepPlan` out.

A balancer's module is imported when the balancer is first read.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any

from trimtab.policies.policy import Policy, Traits, View, make_view

# Module and class of each balancer.
_CLASSES = {
    "static": ("static", "Static"),
    "scheduled": ("static", "Scheduled"),
    "eplb": ("rivals.eplb", "Eplb"),
    "eplb_oracle": ("rivals.eplb", "EplbOracle"),
    "fastermoe": ("rivals.fastermoe", "FasterMoe"),
    "llep": ("rivals.llep", "Llep"),
    "laer": ("rivals.laer", "Laer"),
    "ultraep": ("rivals.ultraep", "UltraEp"),
    "moonep": ("rivals.moonep", "MoonEp"),
    "echo": ("rivals.echo", "Echo"),
    "taot": ("rivals.taot", "Taot"),
    "feplb": ("rivals.feplb", "Feplb"),
    "relibra": ("rivals.relibra", "ReLibra"),
    "foremoe": ("rivals.foremoe", "ForeMoe"),
    "routepack": ("rivals.routepack", "RoutePack"),
    "trimtab": ("trimtab", "Trimtab"),
    "balanced": ("static", "Balanced"),
}


class Registry(MutableMapping[str, Policy]):
    """Balancers by name, with their default parameters, each created when it is first read.

    Args:
        classes: module and class of each balancer.
    """

    def __init__(self, classes: Mapping[str, tuple[str, str]]) -> None:
        self._entries: dict[str, Policy | tuple[str, str]] = {**classes}

    def __getitem__(self, name: str) -> Policy:
        entry = self._entries[name]
        if not isinstance(entry, tuple):
            return entry
        policy: Policy = _load(*entry)()
        self._entries[name] = policy
        return policy

    def __setitem__(self, name: str, policy: Policy) -> None:
        self._entries[name] = policy

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _load(module: str, class_name: str) -> Any:
    return getattr(import_module(f"{__name__}.{module}"), class_name)


def __getattr__(name: str) -> Any:
    """The classes of the balancers."""
    for module, class_name in _CLASSES.values():
        if class_name == name:
            return _load(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


POLICIES = Registry(_CLASSES)

__all__ = ["POLICIES", "Policy", "Traits", "View", "make_view"]
