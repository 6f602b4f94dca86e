"""`write_renumbered`: writes a checkpoint's safetensors files with experts in another order, a part at a time."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.files import read_small_text
from trimtab.renumber.expert_tensors import Change, Tensor, changes_of
from trimtab.trace.numbering import FILE, Numbering

INDEX = "model.safetensors.index.json"
# Read and written at once.
PART_BYTES = 16 << 20
# Weights in other forms keep the old numbers, so they are not copied.
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")

log = logging.getLogger("trimtab")


@dataclass(frozen=True)
class CheckpointFiles:
    """The safetensors files of a checkpoint's folder.

    Attributes:
        model: the folder.
        zero_experts, patterns: as in `changes_of`.
    """

    model: Path
    zero_experts: int = 0
    patterns: Sequence[str] = ()

    @cached_property
    def headers(self) -> dict[str, dict[str, Any]]:
        """Of each file, by name. Raises InputError if there are none, or one is damaged."""
        return {file: _read_header(self.model / file) for file in _weight_files(self.model)}

    def changes(self, orders: Mapping[int, Array]) -> dict[str, Change]:
        """Of the tensors that are indexed by expert, for orders `[E]` by decoder layer: old ids by new ones.

        Raises:
            InputError: as `changes_of`.
        """
        config = json.loads(read_small_text(self.model / "config.json"))
        return changes_of(
            (tensor for header in self.headers.values() for tensor in _tensors(header)),
            orders,
            model_type=config.get("text_config", config).get("model_type", ""),
            zero_experts=self.zero_experts,
            patterns=self.patterns,
        )


def write_renumbered(files: CheckpointFiles, output: Path, orders: Mapping[int, Array], numbering: Numbering) -> None:
    """Write a checkpoint to the new folder `output`, with experts in another order.

    Config, tokenizer and other small files are copied; weights in other forms and folders are left out, with a line.
    The folder appears when it is complete.

    Args:
        orders: as in `CheckpointFiles.changes`.
        numbering: of the new model.

    Raises:
        InputError: if a tensor is unclear. Nothing is written then.
    """
    changes, model = files.changes(orders), files.model
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{secrets.token_hex(8)}.partial")
    partial.mkdir()
    try:
        _copy_others(model, partial, list(files.headers))
        for file, header in files.headers.items():
            with (model / file).open("rb") as source, (partial / file).open("xb") as target:
                _write_file(source, target, header, changes)
                os.fsync(target.fileno())
        if (model / INDEX).exists():
            index = json.loads((model / INDEX).read_text())
            names = {old: change.name for old, change in changes.items()}
            index["weight_map"] = {names.get(name, name): file for name, file in index["weight_map"].items()}
            (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        numbering.save(partial)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _weight_files(model: Path) -> list[str]:
    """Names of the files that hold the weights: those of the index, or all."""
    if not (model / INDEX).exists():
        if files := sorted(path.name for path in model.glob("*.safetensors")):
            return files
        raise InputError(f"{model}: no safetensors files; expected a Hugging Face checkpoint")
    try:
        files = sorted(set(json.loads((model / INDEX).read_text())["weight_map"].values()))
        missing = [file for file in files if Path(file).name != file or not (model / file).is_file()]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise InputError(f"{model / INDEX}: not an index of safetensors files") from None
    if missing:
        raise InputError(f"{model / INDEX}: names {missing[0]}, which is not a file of the folder")
    return files


def _copy_others(model: Path, target: Path, weights: Sequence[str]) -> None:
    left_out = []
    for path in sorted(model.iterdir()):
        if path.name in (INDEX, FILE, *weights):
            continue
        if path.is_dir() or path.suffix in OTHER_WEIGHTS:
            left_out.append(path.name)
        else:
            shutil.copy2(path, target / path.name)
    if left_out:
        log.info("not copied, since weights in them keep the old numbers: %s", ", ".join(left_out))


def _read_header(path: Path) -> dict[str, Any]:
    """A file's header, by tensor. Raises InputError unless safetensors' own library finds the file whole."""
    try:
        with safe_open(path, "numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({error})") from None
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header


def _tensors(header: Mapping[str, Any]) -> Iterable[Tensor]:
    """The tensors of a header in the order of their bytes."""
    places = {name: value for name, value in header.items() if name != "__metadata__"}
    for name, value in sorted(places.items(), key=lambda item: item[1]["data_offsets"]):
        first, end = value["data_offsets"]
        yield Tensor(name, tuple(value["shape"]), first, end - first)


def _write_file(source: BinaryIO, target: BinaryIO, header: Mapping[str, Any], changes: Mapping[str, Change]) -> None:
    """Every tensor keeps the place of its bytes; parts of it, or its name, change."""
    names = {name: changes[name].name if name in changes else name for name in header}
    text = json.dumps({names[name]: value for name, value in header.items()}, separators=(",", ":")).encode()
    # Data begin at a multiple of 8 bytes, as safetensors' own library writes them.
    text += b" " * (-len(text) % 8)
    target.write(len(text).to_bytes(8, "little") + text)
    source.seek(0)
    start = 8 + int.from_bytes(source.read(8), "little")
    for tensor in _tensors(header):
        change = changes.get(tensor.name)
        if change is None or change.order_E is None:
            _copy(source, target, start + tensor.first, tensor.size)
            continue
        size = tensor.size // len(change.order_E)
        for part in change.order_E.tolist():
            _copy(source, target, start + tensor.first + part * size, size)


def _copy(source: BinaryIO, target: BinaryIO, first: int, size: int) -> None:
    source.seek(first)
    while size:
        part = source.read(min(size, PART_BYTES))
        if not part:
            raise InputError(f"{source.name}: ended while it was read")
        target.write(part)
        size -= len(part)
