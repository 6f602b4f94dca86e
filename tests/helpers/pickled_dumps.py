"""Dumps of frameworks that are not installed: stand-ins of their classes."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch

from trimtab.trace.containers import torch_files


@contextmanager
def pretend(*things: Any) -> Iterator[None]:
    """Let pickle find these classes and functions in the modules that they name, for as long as this lasts.

    Their `__module__` and `__qualname__` say where they claim to live.
    """
    before = dict(sys.modules)
    try:
        for thing in things:
            parts = thing.__module__.split(".")
            for depth in range(1, len(parts) + 1):
                sys.modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
            if "." not in thing.__qualname__:
                setattr(sys.modules[thing.__module__], thing.__qualname__, thing)
        yield
    finally:
        for name in set(sys.modules) - set(before):
            del sys.modules[name]


def claim(module: str, name: str, thing: Any) -> Any:
    """The class or function under another name."""
    thing.__module__, thing.__qualname__, thing.__name__ = module, name, name.rpartition(".")[2]
    return thing


def routes(rng: np.random.Generator, tokens: int, layers: int, top_k: int, num_experts: int) -> Any:
    """`[tokens, layers, top_k]` int64, distinct ids within top_k."""
    return np.argsort(rng.random((tokens, layers, num_experts)), axis=-1)[:, :, :top_k]


def load(content: bytes) -> Any:
    return torch_files.loads(memoryview(content))


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()
