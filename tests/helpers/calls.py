"""`called`: a function of a trace and a run, with fields of the run among its other arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import trimtab

FIELDS = {field.name for field in fields(trimtab.Run)}


def called(function: Callable[..., Any], trace: Any, **arguments: Any) -> Any:
    """The result; a list for a field of the run is a sweep."""
    of_run = {name: arguments.pop(name) for name in FIELDS & arguments.keys()}
    swept = {name: of_run.pop(name) for name, value in [*of_run.items()] if isinstance(value, list)}
    run = trimtab.Run(**of_run)
    return function(trace, run.sweep(**swept) if swept else run, **arguments)
