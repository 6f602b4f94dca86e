"""Dumps of frameworks that are not installed: stand-ins of their classes, and damaged files."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from helpers.import_items import kept
from trimtab import InputError
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


def damage(content: bytes, rng: np.random.Generator) -> bytes:
    """Cut short, a few bytes changed, or a stretch repeated, left out or moved."""
    kind, place = rng.integers(0, 5), int(rng.integers(0, len(content)))
    if kind == 0:
        return content[:place]
    if kind == 1:
        end = min(len(content), place + int(rng.integers(1, 40)))
        other = int(rng.integers(0, len(content)))
        return content[:other] + content[place:end] + content[other:]
    if kind == 2:
        return content[:place] + content[place + int(rng.integers(1, 20)) :]
    changed = bytearray(content)
    for _ in range(int(rng.integers(1, 4))):
        where = int(rng.integers(0, len(content)))
        changed[where] = int(rng.integers(0, 256)) if kind == 3 else changed[where] ^ (1 << int(rng.integers(0, 8)))
    return bytes(changed)


def damage_program(content: bytes, rng: np.random.Generator) -> bytes:
    """A torch file with its `data.pkl` damaged and the checksums right."""
    source = zipfile.ZipFile(io.BytesIO(content))
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name in source.namelist():
            data = source.read(name)
            archive.writestr(name, damage(data, rng) if name.endswith("data.pkl") else data)
    return target.getvalue()


def survives(content: bytes, file: Path, read: Callable[[], Any], cases: int, seed: int = 0) -> int:
    """Damage a dump in many ways; every one is read or refused in one line. Returns how many were refused.

    A zip file is damaged both as it is and within its pickle.
    """
    rng = np.random.default_rng(seed)
    refused = 0
    for case in range(cases):
        as_it_is = case % 2 == 0 or content[:2] != b"PK"
        file.write_bytes(damage(content, rng) if as_it_is else damage_program(content, rng))
        try:
            for record in kept(read()):
                assert record.ids.ndim == 3
                record.ids.sum()
        except InputError as error:
            refused += 1
            assert "\n" not in str(error), error
            assert len(str(error)) < 400, error
    return refused


def load(content: bytes) -> Any:
    return torch_files.loads(memoryview(content))


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()
