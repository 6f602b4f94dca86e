"""`python -m experiments.token_imbalance`: import trace v1 of Megatron-LM's token-imbalance benchmark.

It is a folder with the routing of one layer and micro-batch:

    manifest.json             "schema_version": 1, "num_experts", "topk", "logical_num_tokens", "world_size", "step_id",
                              "logical_layer_id", "workload_id", "workload_checksum", ...
    tensors/expert_ids.pt     [T, K] int64
    tensors/source_rank.pt    [T] int32, the rank that holds a token before dispatch
    tensors/token_ids.pt      the same as expert_ids
    tensors/gates.pt          [T, K] float32

From `benchmarks/moe/token_imbalance/trace.py` of its pull request 7488. The manifest is the file to import; it states
the SHA-256 of all four tensors, which are checked, and their shapes and dtypes. Gates are not imported.

The tokens of a source rank, in their order, are one sequence.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import main
from trimtab.array_type import Array
from trimtab.cli.options import add_output
from trimtab.cli.parser import Parser
from trimtab.errors import InputError
from trimtab.trace import RoutingTrace, write_trace
from trimtab.trace.containers import torch_files
from trimtab.trace.containers.json_values import json_values
from trimtab.trace.formats.dump_fields import damaged_values, integers, text, whole_field
from trimtab.trace.formats.normalise import Summary, normalise
from trimtab.trace.formats.records import Dropped, ImportOptions, Record
from trimtab.trace.message_text import at_place, kind_of, short

TENSORS = ("expert_ids", "source_rank", "token_ids", "gates")
VERSION = 1


EXAMPLES = ("out/w2/manifest.json -o out/w2.parquet",)


def add_to(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("manifests", type=Path, nargs="+", metavar="FILE", help="manifest.json of each step")
    add_output(parser, "the trace (.parquet)")


def run(options: argparse.Namespace) -> None:
    """Run the command with its options."""
    write_trace(read_traces(options.manifests), options.output)


def read_traces(manifests: Sequence[Path]) -> RoutingTrace:
    """One trace of the folders of several steps. Raises InputError for a file that is no manifest or is damaged."""
    records: list[Record | Dropped] = []
    experts = set()
    for path in manifests:
        with at_place(str(path)):
            records += read(path)
            experts.add(whole_field(_manifest(path), "num_experts"))
    if len(experts) > 1:
        raise InputError(f"the manifests have {sorted(experts)} experts; they should have the same number")
    return RoutingTrace.concatenate(list(normalise(records, ImportOptions(num_experts=experts.pop()), Summary())))


def read(path: Path) -> Iterator[Record]:
    """The records of a manifest and the tensors beside it, one per source rank with tokens."""
    manifest = _manifest(path)
    tensors = manifest.get("tensors")
    if not isinstance(tensors, Mapping):
        raise InputError("no tensors")
    for name in TENSORS:
        _check_file(path.parent, name, tensors.get(name))
    world_size = whole_field(manifest, "world_size")
    whole_field(manifest, "num_experts")
    shape = whole_field(manifest, "logical_num_tokens"), whole_field(manifest, "topk")
    ids_TK = _tensor(path.parent, "expert_ids", tensors, shape)
    source_T = _tensor(path.parent, "source_rank", tensors, shape[:1])
    if not len(ids_TK):
        raise InputError("it has no tokens")
    if source_T.min() < 0 or source_T.max() >= world_size:
        raise InputError(f"source ranks are {source_T.min()} to {source_T.max()}; there are {world_size} ranks")
    for rank in np.unique(source_T).tolist():
        yield Record(
            ids_TK[source_T == rank, None],
            where=f"source rank {rank}",
            step=whole_field(manifest, "step_id"),
            domain=text(manifest.get("workload_id")),
            layers=(whole_field(manifest, "logical_layer_id"),),
        )


def _manifest(path: Path) -> Mapping[str, Any]:
    values = [value for _, value in json_values(path)]
    if len(values) != 1 or not isinstance(values[0], Mapping):
        raise InputError("a manifest should be one JSON object")
    version = values[0].get("schema_version")
    if type(version) is not int or version != VERSION:
        raise InputError(f"schema_version is {short(version)}; only version {VERSION} is known")
    return values[0]


def _check_file(folder: Path, name: str, facts: Any) -> None:
    """Raises InputError unless a tensor's file is the one that the manifest describes.

    It has a fixed name, so none outside of the folder is read.
    """
    relative = f"tensors/{name}.pt"
    if not isinstance(facts, Mapping):
        raise InputError(f"tensors: {name} is {kind_of(facts)}; expected an object")
    if facts.get("file") != relative:
        raise InputError(f"tensors: the file of {name} should be {relative}")
    if not (folder / relative).is_file():
        raise InputError(f"{relative}: no such file beside the manifest")
    with (folder / relative).open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != facts.get("sha256"):
            raise InputError(f"{relative}: damaged or exchanged: its SHA-256 is not that of the manifest")


def _tensor(folder: Path, name: str, tensors: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
    """A tensor of whole numbers, with the shape that the manifest's counts imply and the one that it states."""
    relative = f"tensors/{name}.pt"
    with at_place(relative), damaged_values():
        array = integers(torch_files.load(folder / relative), name, len(shape))
        stated = tensors[name].get("shape"), tensors[name].get("dtype")
        if stated != (list(array.shape), array.dtype.name):
            raise InputError(f"it is {array.dtype.name} {list(array.shape)}, unlike in the manifest")
        if array.shape != shape:
            raise InputError(f"its shape is {list(array.shape)}; with the manifest's counts it should be {list(shape)}")
        return array


if __name__ == "__main__":
    main("experiments.token_imbalance")
