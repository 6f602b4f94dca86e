"""Counts of tokens by layer and expert, without the tokens: from them come tokens whose counts are those.

*Which* experts one token used together is not known, and chosen arbitrarily; a pass is one sequence. That is enough to
see how unevenly experts are used, and to make a placement.

Files: CSV with columns of layer, expert and count, and of a step or pass if there are several; and, with `--format
counts`, arrays `[layers, experts]` or `[passes, layers, experts]` in `.npy`, `.npz`, pickles and torch files.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.messages import note_once
from trimtab.trace.containers import torch_files
from trimtab.trace.formats.dump_fields import as_array
from trimtab.trace.formats.homemade import arrays_in
from trimtab.trace.formats.records import Dropped, ImportOptions, Record
from trimtab.trace.message_text import short

EMPTY_PASSES = "empty forward passes"
_GENERATED = "tokens whose experts are made up to fit recorded counts"
_CUT = "counts that are no whole token of their layer"
# Tokens of a pass; counts of more are made smaller in proportion.
MOST_TOKENS = 1 << 16
_MOST_COUNT, _MOST_CELLS = 1 << 40, 1 << 24
_COUNT = re.compile(r"(.*_)?(counts?|loads?|tokens)|(num|n)_(tokens|rows)|(count|num)_.*")
_PASS = ("step", "pass", "forward_pass_id", "iteration", "iter")


def recognise(path: Path) -> bool:
    """A text file whose first line names columns of layers, experts and counts."""
    try:
        with path.open("rb") as file:
            line = file.read(1 << 10).partition(b"\n")[0].decode("utf-8-sig")
    except (OSError, UnicodeError):
        return False
    return _columns(line.strip().split(",")) is not None


def read_metadata(path: Path) -> ImportOptions:
    """The number of experts of an array; CSV may leave out experts without tokens. Raises InputError as `read`."""
    return ImportOptions(num_experts=None if recognise(path) else _counts(path, ImportOptions())[0].shape[-1])


def read(path: Path, options: ImportOptions) -> Iterator[Record | Dropped]:
    """The records of a file, one a pass."""
    counts_PLE, layers = _counts(path, options)
    yield from records_of_counts(counts_PLE, range(len(counts_PLE)), options, layers)


def _counts(path: Path, options: ImportOptions) -> tuple[Array, Sequence[int] | None]:
    """`[passes, layers, experts]` int64, and the decoder layers if they are known."""
    if recognise(path):
        return _of_csv(path), None
    found = [array for _, array in arrays_in(torch_files.load(path)) if len(array.shape) in (2, 3)]
    if len(found) != 1:
        raise InputError("holds no counts: expected CSV, or one array [layers, experts] or [passes, layers, experts]")
    counts = as_array(found[0])
    counts_PLE = counts.astype(np.int64).reshape(-1, *counts.shape[-2:])
    moe = options.moe_layers
    return counts_PLE, moe if moe and len(moe) == counts_PLE.shape[1] else None


def _columns(names: list[str]) -> tuple[str | None, str, str, str] | None:
    """Names of the columns of passes, None without, layers, experts and counts; None unless all of these are there."""
    layers, experts = ([name for name in names if word in name.lower()] for word in ("layer", "expert"))
    others = [name for name in names if name not in layers + experts]
    passes = [name for name in others if name.lower() in _PASS]
    counts = [name for name in others if _COUNT.fullmatch(name.lower())]
    if len(layers) != 1 or len(experts) != 1 or len(counts) != 1:
        return None
    return next(iter(passes), None), layers[0], experts[0], counts[0]


def _of_csv(path: Path) -> Array:
    cells: list[list[int]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            names = _columns([name.strip() for name in rows.fieldnames or ()])
            assert names is not None
            for number, row in enumerate(rows, 2):
                values = {(key or "").strip(): value for key, value in row.items()}
                texts = [str(values.get(name) or "").strip() for name in names if name is not None]
                if not all(text.isdecimal() and len(text) < 14 for text in texts):
                    raise InputError(f"line {number}: {short(', '.join(texts))}; they should be whole numbers")
                cells.append([0] * (4 - len(texts)) + list(map(int, texts)))
    except (UnicodeError, csv.Error) as error:
        raise InputError(f"no CSV of counts ({error})") from None
    if not cells:
        raise InputError("no counts below its first line")
    table_N4 = np.array(cells, np.int64)
    passes, place_N = np.unique(table_N4[:, 0], return_inverse=True)
    shape = len(passes), int(table_N4[:, 1].max()) + 1, int(table_N4[:, 2].max()) + 1
    if np.prod(np.array(shape, float)) > _MOST_CELLS:
        raise InputError(f"{shape[1]} layers and {shape[2]} experts; are the columns swapped?")
    counts_PLE = np.zeros(shape, np.int64)
    np.add.at(counts_PLE, (place_N, table_N4[:, 1], table_N4[:, 2]), table_N4[:, 3])
    return counts_PLE


def records_of_counts(
    counts: Iterable[Array], names: Iterable[int], options: ImportOptions, layers: Sequence[int] | None = None
) -> Iterator[Record | Dropped]:
    """One record a pass, whose tokens by layer and expert are the counts.

    A layer's experts, each repeated by its count, are listed in order and assigned to the T tokens in turn. No expert
    was counted more than T times, so no token gets one twice. The tokens are in random order.

    Args:
        counts: `[layers, experts]` integers of each pass.
        names: of the passes.
        options: top_k.
        layers: decoder layers of the first axis; by default its places.

    Raises:
        InputError: naming the pass and layer, if no tokens have these counts.
    """
    if not options.top_k:
        raise InputError(
            "holds counts of tokens by expert only: give the model's top_k (--top-k) for tokens that fit these counts, "
            "or record the experts of each token (SGLang: --expert-distribution-recorder-mode per_token)"
        )
    passes = list(counts)
    used = [counts_LE.any(axis=1) for counts_LE in passes]
    if not used or not np.any(used):
        raise InputError("its counts are all zero")
    places = np.flatnonzero(np.any(used, axis=0))
    numbers = tuple(int(place if layers is None else layers[place]) for place in places.tolist())
    for name, counts_LE in zip(names, passes, strict=True):
        where = f"forward pass {name}"
        if counts_LE.min() < 0 or counts_LE.max() >= _MOST_COUNT:
            raise InputError(f"{where}: damaged, it counts {int(counts_LE.min())} to {int(counts_LE.max())} tokens")
        assigned_L = counts_LE[places].sum(axis=1, dtype=np.int64)
        counted = int(assigned_L.max()) // options.top_k
        if not counted:
            yield Dropped(EMPTY_PASSES)
            continue
        num_tokens = min(counted, MOST_TOKENS)
        if num_tokens < counted:
            note_once(f"{where}: counts of {counted:,} tokens, made smaller in proportion, to {num_tokens:,}")
        ids_TLK = np.full((num_tokens, len(places), options.top_k), -1, np.int32)
        for place, layer in enumerate(places.tolist()):
            tokens = int(assigned_L[place]) // options.top_k
            yield Dropped(_CUT, int(assigned_L[place]) - tokens * options.top_k)
            if int(counts_LE[layer].max()) > tokens:
                raise InputError(
                    f"{where}, layer {numbers[place]}: {int(assigned_L[place])} counts in all and "
                    f"{int(counts_LE[layer].max())} of expert {int(counts_LE[layer].argmax())} can't come from tokens "
                    f"with {options.top_k} different experts each; is top_k right?"
                )
            tokens = tokens * num_tokens // counted
            parts_E = _in_proportion(counts_LE[layer].astype(np.int64), tokens * options.top_k)
            ids_TK = np.repeat(np.arange(len(parts_E)), parts_E).reshape(options.top_k, tokens).T
            # Every part of the tokens has the loads of all.
            ids_TLK[:tokens, place] = np.random.default_rng(layer).permutation(ids_TK)
        yield Record(ids_TLK, where, layers=numbers)
        yield Dropped(_GENERATED, num_tokens)


def _in_proportion(counts_E: Array, total: int) -> Array:
    """Whole numbers with this sum, each less than one away from its part; the largest remainders are rounded up."""
    whole_E, rest_E = np.divmod(counts_E * total, max(1, int(counts_E.sum())))
    more = total - int(whole_E.sum())
    whole_E[np.argsort(-rest_E, kind="stable")[:more]] += 1
    return whole_E
