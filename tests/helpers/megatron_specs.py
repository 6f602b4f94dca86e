"""Parts of Megatron's specs of models, which newer versions keep in functions with given arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any


def parts_of_spec(spec: Any) -> Iterator[Any]:
    """Yields a spec and all specs in it: of blocks, layers, submodules, and arguments of their builders."""
    yield spec
    inner: list[Any] = []
    if isinstance(spec, partial):
        inner = [*spec.args, *spec.keywords.values()]
    elif is_dataclass(spec) and not isinstance(spec, type):
        inner = [getattr(spec, field.name) for field in fields(spec)]
    elif isinstance(spec, list | tuple):
        inner = list(spec)
    for each in inner:
        yield from parts_of_spec(each)
