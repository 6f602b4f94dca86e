"""The TOML file of a `ClusterSpec`: one table per hardware parameter (a *figure*), with value and source.

A file with `base`, the name of a preset, may leave figures out: they are the preset's.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from trimtab.cluster.presets import preset_names, read_preset
from trimtab.cluster.specs import ClusterSpec
from trimtab.errors import InputError
from trimtab.files import read_small_text, write_atomically

FORMAT = "trimtab-cluster-1"
# Fields of a run, not of a kind of node: the number of ranks and the replicas that they hold.
_RUN_FIELDS = ("ranks", "slots_per_rank", "mirror_experts")
_HEADER = ("format", "name", "base")
_FIGURES = {field.name: field.type for field in fields(ClusterSpec) if field.name not in (*_RUN_FIELDS, *_HEADER)}
# Figures that files of earlier versions don't have; they are the defaults of `ClusterSpec`.
_LATER = {"transfer_tax": ClusterSpec.transfer_tax}
_LARGEST_COUNT = 1 << 20


def load_cluster(
    text: str | os.PathLike[str], *, ranks: int, slots_per_rank: int = 2, ranks_per_node: int | None = None
) -> ClusterSpec:
    """Returns the cluster of a preset's name, such as `h100x8`, or of a TOML file.

    Args:
        text: a preset's name, else a path.
        ranks: of the expert-parallel group.
        slots_per_rank: replicas that a rank has room for.
        ranks_per_node: by default the file's value, or `ranks` if that is smaller.

    Raises:
        InputError: if the file is not a valid cluster file, or `ranks_per_node` does not divide `ranks`. The message is
            one line and names file and key.
    """
    name, figures = _read(text)
    figures["ranks_per_node"] = min(ranks, figures["ranks_per_node"]) if ranks_per_node is None else ranks_per_node
    try:
        return ClusterSpec(ranks=ranks, slots_per_rank=slots_per_rank, name=name, **figures)
    except InputError as error:
        raise InputError(f"{text}: {error}") from None


def load_node(text: str | os.PathLike[str]) -> ClusterSpec:
    """Returns one whole node of a preset or a TOML file, as `load_cluster` reads it."""
    return load_cluster(text, ranks=_read(text)[1]["ranks_per_node"])


def _read(text: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """Name and figures of a preset, else of a file."""
    preset = read_preset("cluster", os.fspath(text))
    return _parse(_text(Path(text)) if preset is None else preset, str(text))


def write_cluster(
    path: str | os.PathLike[str], spec: ClusterSpec, sources: Mapping[str, str], *, base: str | None = None
) -> None:
    """Write the figures of a cluster's nodes to a file that `load_cluster` reads. Writes are atomic.

    Args:
        sources: description of where each figure comes from. A figure without a source is not written.
        base: preset with the figures that have no source; None if all have one.

    Raises:
        InputError: if the name or a source is missing, a source belongs to no figure, or `base` is no preset.
    """
    if not spec.name.strip():
        raise InputError(f"{path}: the cluster has no name; it should have that of a kind of node")
    based = {} if base is None else _figures_of_base(base, str(path))
    for key, text in sources.items():
        if key not in _FIGURES:
            raise InputError(f"{path}: {key} has a source but is not a figure; the figures are {', '.join(_FIGURES)}")
        if not text.strip():
            raise InputError(f"{path}: {key} has no source; it should say where the figure comes from")
    for key in _FIGURES:
        if key not in sources and (key not in based or based[key] != getattr(spec, key)):
            raise InputError(f"{path}: {key} has no source; it should say where the figure comes from")
    lines = [f"format = {_quoted(FORMAT)}", f"name = {_quoted(spec.name)}"]
    if base is not None:
        lines += ["# The preset with all figures that are not below.", f"base = {_quoted(base)}"]
    for key, kind in _FIGURES.items():
        if key in sources:
            value, source = _number(getattr(spec, key), kind), _quoted(sources[key])
            lines += ["", f"[{key}]", f"value = {value}", f"source = {source}"]
    write_atomically(path, "\n".join(lines) + "\n")


def _text(path: Path) -> str:
    if not path.is_file():
        raise InputError(
            f"{path}: neither a cluster that comes with Trimtab ({', '.join(preset_names('cluster'))}) nor a file; "
            "expected one of these or a TOML file"
        )
    return read_small_text(path)


def _parse(text: str, where: str) -> tuple[str, dict[str, Any]]:
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not a TOML file ({_one_line(str(error))})") from None
    if content.get("format") != FORMAT:
        raise InputError(f'{where}: not the file of a cluster; it should begin with format = "{FORMAT}"')
    name = content.get("name")
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"{where}: name should be the name of a kind of node, in quotes")
    for key in content:
        if key not in _FIGURES and key not in _HEADER:
            raise InputError(f"{where}: {_one_line(key)} is unknown; the figures are {', '.join(_FIGURES)}")
    figures = _LATER | (_figures_of_base(content["base"], where) if "base" in content else {})
    for key, kind in _FIGURES.items():
        if key in content or key not in figures:
            figures[key] = _figure(content.get(key), kind, f"{where}: {key}")
    return name, figures


def _figures_of_base(base: Any, where: str) -> dict[str, Any]:
    text = read_preset("cluster", base) if isinstance(base, str) else None
    if text is None:
        raise InputError(f"{where}: base should be the name of a preset: {', '.join(preset_names('cluster'))}")
    return _parse(text, base)[1]


def _figure(table: Any, kind: Any, where: str) -> bool | int | float:
    if not isinstance(table, dict):
        state = "is missing" if table is None else "is not a table"
        raise InputError(f"{where} {state}; it should be a table with value and source")
    for key in table:
        if key not in ("value", "source"):
            raise InputError(f"{where}: {_one_line(key)} is unknown; a figure has value and source")
    source = table.get("source")
    if not isinstance(source, str) or not source.strip():
        raise InputError(f"{where} has no source; it should say in words where the figure comes from")
    value = table.get("value")
    if kind == "bool":
        if not isinstance(value, bool):
            raise InputError(f"{where}: value should be true or false")
        return value
    if kind == "int":
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_COUNT:
            raise InputError(f"{where}: value should be a whole number from 1 to {_LARGEST_COUNT:,}")
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"{where}: value should be a number")
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{where}: value is too large; rates are in operations or bytes a second") from None


def _number(value: float, kind: Any) -> str:
    if kind == "bool":
        return str(value).lower()
    if kind == "int":
        return str(int(value))
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))


def _quoted(text: str) -> str:
    # JSON's escapes are valid in TOML; TOML escapes one more character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
