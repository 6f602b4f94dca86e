"""Kinds of values of a run: clusters, models, slots, and names of ways to run a step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from trimtab.cluster.model_names import known_names, preset_of
from trimtab.cluster.parallel_layout import GRANULARITIES, SHARDINGS
from trimtab.cluster.presets import preset_names
from trimtab.cluster.specs import AUTO
from trimtab.errors import InputError, closest
from trimtab.kinds import Kind, as_given, choice, whole

# What is sent to a node: every row, or a token once; see `ClusterSpec.dispatch_forwards`.
DISPATCHERS = {"rows": False, "tokens": True}


def _slots(value: Any) -> int | str:
    return AUTO if value == AUTO else whole.read(value)


def _index_or_text(text: str) -> int | str:
    return text if text == AUTO else int(text)


def _known(kind: str, names: Callable[[], list[str]], value: Any) -> Any:
    """The value, unless it is a text, but no file, and a preset or a hub id of one has nearly this name."""
    if not isinstance(value, str) or preset_of(value) or value in names() or os.path.exists(value):
        return value
    by_lower_case = {name.lower(): name for name in names()}
    if hint := closest(value.lower(), by_lower_case):
        for lower, name in by_lower_case.items():
            hint = hint.replace(f" {lower}?", f" {name}?")
        raise InputError(f"unknown {kind} {value}{hint}")
    return value


def _override(text: str) -> tuple[str, Any]:
    """Key and value of KEY=VALUE. The value is JSON, or else the text itself."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


slots = Kind('a whole number of at least 0 or "auto"', _slots, _index_or_text, (int, str), metavar="N")
cluster = Kind("a text in quotes", partial(_known, "cluster", partial(preset_names, "cluster")))
model = Kind("a text in quotes", partial(_known, "model", known_names))
config_value = Kind("KEY=VALUE, such as num_hidden_layers=24", as_given, _override, metavar="KEY=VALUE", option="--set")
dispatcher = choice(*DISPATCHERS)
sharding = choice(*SHARDINGS)
granularity = choice(*GRANULARITIES)
