"""Presets of models and clusters: the files in this folder, by name."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Literal

_FOLDERS = {"model": "models", "cluster": "clusters"}


def preset_names(kind: Literal["model", "cluster"]) -> list[str]:
    """Sorted names of the presets of a kind."""
    return sorted(_files(kind))


def read_preset(kind: Literal["model", "cluster"], name: str) -> str | None:
    """The text of a preset's file, or None if there is none of that name."""
    file = _files(kind).get(name)
    return None if file is None else file.read_text(encoding="utf-8")


def _files(kind: str) -> dict[str, Traversable]:
    entries = files(__name__).joinpath(_FOLDERS[kind]).iterdir()
    return {file.name.rpartition(".")[0]: file for file in entries if file.name.endswith((".json", ".toml"))}


def preset_like(gpu: str) -> str:
    """The preset of nodes with a GPU of this name, or `h100x8` if there is none."""
    names = {name: name.removesuffix("x8").removesuffix("-nvl72") for name in preset_names("cluster")}
    fitting = [name for name, model in names.items() if model in gpu.lower()]
    # "H200" contains "H20", and "GB200" contains "B200".
    return max(fitting, key=lambda name: len(names[name]), default="h100x8")
