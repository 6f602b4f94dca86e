"""`PluginOptions`: what a user sets of a plugin, in an environment variable or in the framework's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

from trimtab.cluster.specs import AUTO
from trimtab.errors import InputError

PluginMode = Literal["plan", "shadow", "live", "off"]

MODES: tuple[PluginMode, ...] = ("plan", "shadow", "live", "off")
"""Modes of every plugin."""


@dataclass(frozen=True)
class PluginOptions:
    """Options of a plugin.

    Attributes:
        mode: `plan` balances by recorded routing, `live` without it; `shadow` plans, reports and changes nothing;
            `off` does nothing.
        slots_per_rank: most replicas of one layer on a rank, or `auto`; see `Session`.
    """

    mode: PluginMode = "plan"
    slots_per_rank: int | str = AUTO

    @classmethod
    def from_text(cls, text: str, *, source: str) -> PluginOptions:
        """Options written as `mode=plan slots_per_rank=auto`; empty for the defaults.

        Args:
            source: where the text is from, for messages.

        Raises:
            InputError: if a name or value is unknown, or a name is there twice.
        """
        values: dict[str, str] = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            if not equals:
                raise InputError(f"{source} has {word!r}; it should be name=value pairs, as in '{_EXAMPLE}'")
            if name in values:
                raise InputError(f"{source} has {name} twice")
            values[name] = value
        return cls.from_mapping(values, source=source)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, source: str) -> PluginOptions:
        """Options of a mapping, such as a part of a config; names that are not there have their defaults.

        Raises:
            InputError: as `from_text`.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(f"{source} has no option {name!r}; it has {', '.join(known)}")
        mode = values.get("mode", cls.mode)
        if mode not in MODES:
            raise InputError(f"{source} has mode={mode}; it should be one of {', '.join(MODES)}")
        slots = values.get("slots_per_rank", cls.slots_per_rank)
        return cls(cast(PluginMode, mode), slots if slots == AUTO else _count("slots_per_rank", slots, source))


_EXAMPLE = "mode=plan slots_per_rank=auto"


def _count(name: str, value: Any, source: str) -> int:
    """The value of an option that is 0 or more, a number or its digits."""
    text = str(value)
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"{source} has {name}={value}; it should be auto, or an integer, 0 or more")
    return int(text)
