"""Modules that are not installed, which frameworks' source imports and tests do not use."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types
from collections.abc import Callable, Sequence
from typing import Any


class AnyClass(type):
    """A class with every attribute, each of which is such a class; as a number it is 0."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, AnyClass(name, (Anything,), {}))
        return getattr(cls, name)

    def __int__(cls) -> int:
        return 0

    def __index__(cls) -> int:
        return 0


class Anything(metaclass=AnyClass):
    """Takes the place of all that is named and not used."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        return Anything()


class AbsentModule(types.ModuleType):
    """A module with every name.

    Args:
        make: the value of a name; a class of its own by default.
    """

    __path__: list[str] = []  # noqa: RUF012

    def __init__(self, name: str, make: Callable[[str], Any] | None = None) -> None:
        super().__init__(name)
        vars(self)["_make"] = make or (lambda attribute: AnyClass(attribute, (Anything,), {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, self._make(name))
        return getattr(self, name)


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of some packages, which are not there, for `sys.meta_path`.

    Args:
        roots: the packages.
        make: see `AbsentModule`.
    """

    def __init__(self, roots: Sequence[str], make: Callable[[str], Any] | None = None) -> None:
        self._roots, self._new = roots, make

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(name == root or name.startswith(f"{root}.") for root in self._roots):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return AbsentModule(spec.name, self._new)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
