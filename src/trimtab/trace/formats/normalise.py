"""Conversion of records to trace parts: reads their ids, finds MoE layers and rows with routes, and checks every id.

A record has one layer axis. It lists either all decoder layers, with a fill id in dense layers, or only the MoE layers.
The record's layer numbers or the model's config tell which. Without these it is inferred from the first record with
routes: if K >= 2, a layer in which every token has K equal ids is dense.

There is one rule for rows without a route, whatever the format: with K >= 2, K equal ids of any value; with K = 1, -1,
and 255 and 65535 where they are no experts. Engines fill buffers so: 0 where nothing was written (vLLM, SGLang), -1 in
masked rows of CUDA graphs (SGLang), the largest id of a dtype (Trimtab's traces).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.kernels import kernel
from trimtab.messages import note_once
from trimtab.trace.formats.dump_fields import damaged_values
from trimtab.trace.formats.plausible import Plausibility
from trimtab.trace.formats.records import Dropped, ImportOptions, Record
from trimtab.trace.message_text import at_place, clip, printable
from trimtab.trace.routing import RoutingTrace, hash_tokens, id_dtype, no_route
from trimtab.trace.store import ROW_GROUP_BYTES

# Ids of rows without a route, counted one by one; others together.
FILLS = (-1, 0, 255, 65535)
# Larger than any id; larger values, and values below any padding, are out of range.
TOO_LARGE = 1 << 20
# Maximum number of tokens without recorded routes in one sequence. The file only states this number, so it is limited
# before memory is allocated. Longer than any context.
MAX_MISSING_ROWS = 1 << 20
LONGEST_LABEL = 80
# Ids of a sequence that are in memory as int32 at the same time.
NARROWED_IDS = 1 << 20
# Many times those of any model; the cost of sorting and comparing grows with the square of top-k.
MOST_TOP_K, MOST_LAYERS = 256, 1024

FINE, OUT_OF_RANGE, TWICE, IN_DENSE_LAYER = range(4)


@dataclass
class Summary:
    """Counts of imported and left-out data, updated during an import.

    Attributes:
        format: name of the dump's format.
        sequences, tokens: imported; tokens with rows.
        unknown_rows: imported tokens without a route in any layer.
        unknown_routes: (token, layer) pairs without a route, those of `unknown_rows` included.
        fills: those of them that have a row, by its id; None for all ids that are not in `FILLS`.
        dropped: what the source has and the trace does not, by kind.
        agreement: part of the routes of prompts that are those of another answer to the same prompt, if that is known.
        notes: what is odd, see `plausible`; at the end of an import.
    """

    format: str = ""
    sequences: int = 0
    tokens: int = 0
    unknown_rows: int = 0
    unknown_routes: int = 0
    fills: Counter[int | None] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    agreement: float | None = None
    notes: tuple[str, ...] = ()

    def add(self, other: Summary) -> None:
        """Increase the counts by those of other data of the same dump."""
        for name in ("sequences", "tokens", "unknown_rows", "unknown_routes", "fills", "dropped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def normalise(
    items: Iterable[Record | Dropped],
    options: ImportOptions,
    summary: Summary,
    name: str = "the records",
    odd: Plausibility | None = None,
) -> Iterator[RoutingTrace]:
    """Converts records to trace parts. Each part has at least `ROW_GROUP_BYTES`; the last may be smaller.

    `Dropped` items are only counted.

    Args:
        options: facts of the model; `num_experts` is required.
        summary: its counts are increased.
        name: of all items together, for errors.
        odd: is told of every sequence, if given.

    Raises:
        InputError: naming the record's place, if it can't be of the same model, or an id is out of range or twice in a
            row; or if there is no record with a route.
    """
    layout: _Layout | None = None
    early: list[tuple[Record, Array, Array | None]] = []
    waiting: list[tuple[Record, Array]] = []
    models: list[str] = []
    routes_L: Array | None = None
    size = 0
    for item in items:
        if isinstance(item, Dropped):
            if item.count:
                summary.dropped[item.kind] += item.count
            continue
        with at_place(item.where), damaged_values():
            block = item.block
            ids = item.chosen(block)
            check_form(item, ids)
            item = placed(item, len(ids), options)
            layout = layout or _layout_of(item, ids, options)
            token_ids = item.token_ids
        if len(models) < 2 and item.model not in ("", *models):
            models.append(item.model)
            if len(models) == 2:
                note_once(f"{item.where}: of model {clip(models[1])}; those before it are of {clip(models[0])}")
        padding = len(block) - len(ids) if item.padding is None else item.padding
        if padding:
            summary.dropped["padding rows"] += padding
        token_hash, prompt_hash = item.sequence_hash, item.prompt_hash
        if token_ids is not None:
            token_hash = hash_tokens(token_ids)
            if 0 < item.prompt_length <= len(token_ids):
                prompt_hash = hash_tokens(token_ids[: item.prompt_length])
        early.append(
            (replace(item, source=None, tokens=(), sequence_hash=token_hash, prompt_hash=prompt_hash), ids, token_ids)
        )
        if layout is None:
            continue
        for record, ids, token_ids in early:
            if routes_L is None:
                routes_L = np.zeros(len(layout.columns), np.int64)
            routes = _routes(record, ids, layout, summary, routes_L)
            if odd is not None:
                prompt = record.step, record.prompt_hash
                is_repeat_T = odd.add(routes, layout.num_experts, token_ids, prompt, record.prompt_length)
                if options.drop_repeats:
                    _drop(routes, is_repeat_T, no_route(layout.num_experts), summary)
            waiting.append((record, routes))
            size += routes.nbytes
        early.clear()
        if size >= ROW_GROUP_BYTES:
            yield _join(waiting, layout, options)
            waiting, size = [], 0
    if layout is None:
        raise InputError(f"{name}: no sequence has a route" if early else f"{name}: there are no sequences in it")
    if waiting:
        yield _join(waiting, layout, options)
    if routes_L is not None and not routes_L.all():
        empty = ", ".join(map(str, layout.layer_indices[routes_L == 0].tolist()))
        summary.notes += (f"No token has a route in layers {empty}: were they not recorded, as those of a stage?",)


@dataclass(frozen=True)
class _Layout:
    """The layout of a dump's records, and of the model.

    Attributes:
        where: the record that it is from.
        axis: layers of a record.
        columns: `[L]` int64, indices of the MoE layers among them.
        dense: indices of the others.
        layer_indices: `[L]` decoder layers.
    """

    where: str
    axis: int
    columns: Array
    dense: Array
    layer_indices: Array
    num_experts: int
    top_k: int


def check_form(record: Record, ids: Array) -> None:
    if ids.dtype.kind not in "iu":
        raise InputError(f"expert ids are {ids.dtype}; they should be integers")
    if ids.ndim != 3 or 0 in ids.shape[1:]:
        raise InputError(f"expert ids have shape {ids.shape}; it should be [tokens, layers, top_k]")
    if ids.shape[1] > MOST_LAYERS:
        raise InputError(
            f"expert ids have shape {ids.shape}: {ids.shape[1]} layers; is it [layers, tokens, top_k]? It should be "
            "[tokens, layers, top_k], as ids.swapaxes(0, 1) makes it"
        )
    if record.first < 0:
        raise InputError(f"its first row is that of token {record.first}; tokens count from 0")
    if ids.shape[2] > MOST_TOP_K:
        raise InputError(f"top-{ids.shape[2]} routing; it should be top-{MOST_TOP_K} at most")
    rows = record.first + len(ids)
    tokens = rows + 1 if record.num_tokens is None else record.num_tokens
    if rows > tokens:
        raise InputError(f"{rows} rows of expert ids for {tokens} tokens; at most {tokens} are allowed")
    if max(record.first, tokens - len(ids)) > MAX_MISSING_ROWS:
        raise InputError(
            f"more than {MAX_MISSING_ROWS} tokens have no expert ids ({len(ids)} rows for {tokens} tokens)"
        )
    if not 0 <= record.step < 1 << 31:
        raise InputError(f"step {record.step}; it should be 0 to 2**31 - 1")


def placed(record: Record, rows: int, options: ImportOptions) -> Record:
    """The record with the place of its rows. Raises InputError if nothing tells it."""
    missing = 0 if record.placed or record.num_tokens is None else record.num_tokens - 1 - rows
    if missing <= 0 or options.rows_at == "start":
        return record
    if options.rows_at is None:
        raise InputError(
            f"{rows} rows of expert ids for {record.num_tokens} tokens; {rows + missing} are expected, and nothing "
            "tells which tokens have none: give --rows-at end if the first have none, --rows-at start if the last"
        )
    return replace(record, first=missing)


def _layout_of(record: Record, ids: Array, options: ImportOptions) -> _Layout | None:
    """The layout of this record; None if it has no routes."""
    axis, top_k = ids.shape[1:]
    if options.top_k not in (None, top_k):
        raise InputError(f"it has top-{top_k} routing; it should be top-{options.top_k}, as given")
    if record.layers is None and options.moe_layers is None and options.num_layers not in (None, axis):
        raise InputError(f"it has {axis} layers; it should have {options.num_layers}, as given")
    routes: Array = np.asarray(are_routes(ids).any(axis=0))
    if not routes.any():
        return None
    columns, layers = _moe_layers(record, ids, routes, options)
    if options.num_experts is None:
        raise InputError(
            f"the number of experts per layer is unknown (largest id: {int(ids.max())}); give "
            "--num-experts, or --model with a config.json or a model's name"
        )
    if top_k > options.num_experts:
        raise InputError(f"it has top-{top_k} routing; there are {options.num_experts} experts")
    return _Layout(
        where=record.where,
        axis=axis,
        columns=columns,
        dense=np.setdiff1d(np.arange(axis), columns),
        layer_indices=layers.astype(np.int32),
        num_experts=options.num_experts,
        top_k=top_k,
    )


def are_routes(ids: Array) -> Array:
    """`[t, layers]` bool: False for rows without a route, of any number of experts.

    With K >= 2, those are rows of K equal ids; with K = 1, ids of `FILLS` other than 0.
    """
    distinct = ids != ids[:, :, :1] if ids.shape[2] > 1 else ~np.isin(ids, [fill for fill in FILLS if fill])
    return np.asarray(distinct.any(axis=2))


def _moe_layers(record: Record, ids: Array, routes: Array, options: ImportOptions) -> tuple[Array, Array]:
    """Indices of the MoE layers in the record, and their decoder layers."""
    axis = len(routes)
    if record.layers is not None:
        return np.arange(axis), np.array(record.layers)
    if options.moe_layers is None:
        if ids.shape[2] == 1 and not (ones := (ids > 0).any(axis=(0, 2))).all():
            raise InputError(
                f"every token has expert 0 in layer {int(ones.argmin())}, which may have no experts at "
                "all; give --model with a config.json or a model's name"
            )
        return np.flatnonzero(routes), np.flatnonzero(routes)
    moe = np.array(options.moe_layers)
    if axis == len(moe):
        return np.arange(axis), moe
    if options.num_layers in (None, axis) and axis > moe.max():
        return moe, moe
    turned = "; is it [layers, tokens, top_k]?" if len(ids) in (options.num_layers, len(moe)) else ""
    raise InputError(
        f"it has {axis} layers; the model has {options.num_layers}, {len(moe)} of them with experts{turned}"
    )


def _routes(record: Record, ids: Array, layout: _Layout, summary: Summary, routes_L: Array) -> Array:
    """`[T, L, K]`, one row for each token that was fed to the model, unknown routes as `no_route`; `routes_L` counts
    the others."""
    if ids.shape[1:] != (layout.axis, layout.top_k) or (
        record.layers is not None and not np.array_equal(record.layers, layout.layer_indices)
    ):
        raise InputError(
            f"{record.where}: it has {ids.shape[1]} layers, top-{ids.shape[2]}, but {layout.where} has "
            f"{layout.axis}, top-{layout.top_k}: they are of different models"
        )
    rows = len(ids)
    tokens = record.first + rows if record.num_tokens is None else max(record.num_tokens - 1, 0)
    ids = ids[: max(tokens - record.first, 0)]
    if len(ids) < rows:
        summary.dropped["rows of last tokens, which are never fed"] += rows - len(ids)
    if len(layout.dense):
        summary.dropped["layers without experts"] = len(layout.dense)
    routes = np.full(
        (tokens, len(layout.columns), layout.top_k), no_route(layout.num_experts), id_dtype(layout.num_experts)
    )
    fills_F = np.zeros(len(FILLS) + 1, np.int64)
    unknown_rows = 0
    at_once = max(1, NARROWED_IDS // ids[:1].size) if len(ids) else 1
    for start in range(0, len(ids), at_once):
        part = ids[start : start + at_once]
        fault, token, layer, without = _convert(
            narrowed(part),
            layout.columns,
            layout.dense,
            layout.num_experts,
            routes[record.first + start :],
            fills_F,
            routes_L,
        )
        unknown_rows += without
        if fault == FINE:
            continue
        token += start
        place = (
            f"{record.where}, token {record.first + token}, layer {record.layers[layer] if record.layers else layer}"
        )
        raise InputError(f"{place}: {_reason(fault, ids[token, layer], layout)}")
    missing_rows = tokens - len(ids)
    summary.sequences += 1
    summary.tokens += tokens
    summary.unknown_rows += unknown_rows + missing_rows
    summary.unknown_routes += int(fills_F.sum()) + missing_rows * len(layout.columns)
    for fill, count in zip((*FILLS, None), fills_F.tolist(), strict=True):
        if count:
            summary.fills[fill] += count
    return routes


def _drop(routes_TLK: Array, is_repeat_T: Array, unknown: int, summary: Summary) -> None:
    """Make the routes of these rows, each of which has some, unknown."""
    if not (repeats := int(is_repeat_T.sum())):
        return
    summary.unknown_routes += int((routes_TLK[is_repeat_T, :, 0] != unknown).sum())
    summary.unknown_rows += repeats
    summary.dropped["repeated rows, now without route"] += repeats
    routes_TLK[is_repeat_T] = unknown


def _reason(fault: int, row: Array, layout: _Layout) -> str:
    ids = f"expert ids {row.tolist()}"
    if fault == IN_DENSE_LAYER:
        return f"{ids}; this layer has no experts"
    if fault == TWICE:
        return f"{ids} have one twice; they should be distinct"
    return f"{ids}; they should be 0 to {layout.num_experts - 1}"


def narrowed(ids: Array) -> Array:
    """The same ids as contiguous int32; values that do not fit become out of range."""
    if ids.dtype.itemsize > 4 or ids.dtype == np.uint32:
        ids = np.minimum(ids, np.array(TOO_LARGE, ids.dtype))
        if ids.dtype.kind == "i":
            ids = np.maximum(ids, -TOO_LARGE)
    return np.ascontiguousarray(ids, np.int32)


def _join(waiting: list[tuple[Record, Array]], layout: _Layout, options: ImportOptions) -> RoutingTrace:
    records = [record for record, _ in waiting]
    return RoutingTrace.from_sequences(
        [routes for _, routes in waiting],
        num_experts=layout.num_experts,
        layer_indices=layout.layer_indices,
        prompt_lengths=[min(max(record.prompt_length, 0), len(routes)) for record, routes in waiting],
        steps=[record.step or options.step for record in records],
        sequence_hashes=np.array([record.sequence_hash for record in records], np.uint64),
        prompt_hashes=[record.prompt_hash for record in records],
        domains=[_label(record.domain or options.domain) for record in records],
        model=_label(options.model),
        sampled=options.sampled,
    )


def _label(name: str) -> str:
    """A domain or model name for tables, as one short line."""
    return printable(name[:LONGEST_LABEL], " ").strip()


@kernel
def _convert(ids_TAK, columns_L, dense_D, num_experts, routes_TLK, fills_F, routes_L):  # type: ignore[no-untyped-def]
    """Write the routes of the MoE layers; rows without a route are not changed.

    Args:
        ids_TAK: `[T, layers, K]` int32.
        columns_L: `[L]` int64, places of MoE layers. dense_D: of the others.
        routes_TLK: `[T, L, K]` uint8 or uint16, written to; it holds `no_route`.
        fills_F: int64, increased by the rows without a route, by their id (`FILLS`, others last). routes_L: by the rows
            with one.

    Returns:
        A fault with its token and layer, and how many tokens have no route in any layer.
    """
    top_k = ids_TAK.shape[2]
    unknown_rows = 0
    # The row in which an expert was last seen, counted over all layers.
    row = 0
    seen_in_E = np.zeros(num_experts, np.int64)
    for t in range(ids_TAK.shape[0]):
        unknown = 0
        for place in range(len(columns_L)):
            layer = columns_L[place]
            first = ids_TAK[t, layer, 0]
            which = 0
            while which < len(FILLS) and FILLS[which] != first:
                which += 1
            same = 1
            while same < top_k and ids_TAK[t, layer, same] == first:
                same += 1
            if same == top_k and (top_k > 1 or (which < len(FILLS) and not 0 <= first < num_experts)):
                fills_F[which] += 1
                unknown += 1
                continue
            row += 1
            for k in range(top_k):
                expert = ids_TAK[t, layer, k]
                if expert < 0 or expert >= num_experts:
                    return OUT_OF_RANGE, t, layer, unknown_rows
                if seen_in_E[expert] == row:
                    return TWICE, t, layer, unknown_rows
                seen_in_E[expert] = row
                routes_TLK[t, place, k] = expert
            routes_L[place] += 1
        for layer in dense_D:
            first = ids_TAK[t, layer, 0]
            if top_k == 1 and 0 < first < num_experts:
                return IN_DENSE_LAYER, t, layer, unknown_rows
            for k in range(1, top_k):
                if ids_TAK[t, layer, k] != first:
                    return IN_DENSE_LAYER, t, layer, unknown_rows
        unknown_rows += unknown == len(columns_L)
    return FINE, -1, -1, unknown_rows
