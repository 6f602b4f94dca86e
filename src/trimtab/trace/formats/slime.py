"""slime and miles: samples with `rollout_routed_experts`, int32 `[len(tokens) - 1, layers, top_k]` each.

`--save-debug-rollout-data` writes `torch.save({"rollout_id": ..., "samples": [sample.to_dict(), ...]})`,
`--save-debug-train-data` the same in columns: `{"rollout_data": {"tokens": [...], "rollout_routed_experts": [...]}}`.
miles fills rows without a route with -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers import torch_files
from trimtab.trace.formats.dump_fields import as_array, field, integers, text, whole_number
from trimtab.trace.formats.records import Dropped, ImportOptions, Record
from trimtab.trace.formats.responses import shape_flat

KEY = "rollout_routed_experts"
WITHOUT_ROUTES = Dropped("samples without routes")
_DOMAIN_KEYS = ("data_source", "domain", "dataset", "dataset_name", "rm_type")
_DEEPEST_GROUP = 4


def recognise(path: Path) -> bool:
    """True for a torch file or pickle with the name `rollout_routed_experts`."""
    return bool(torch_files.mentions(path, KEY))


def read(path: Path, options: ImportOptions) -> Iterator[Record | Dropped]:
    """The records of a dump, one per sample with routes."""
    dump = torch_files.load(path)
    step = whole_number(field(dump, "rollout_id")) if isinstance(dump, Mapping) else 0
    samples = dump
    if isinstance(dump, Mapping):
        samples = field(dump, "samples")
        columns = field(dump, "rollout_data", dump)
        if samples is None and field(columns, KEY) is not None:
            samples = _from_columns(columns)
    if not isinstance(samples, list | tuple):
        raise InputError("not a dump of slime or miles: it should hold a list of 'samples'")
    yield from records_of_samples(samples, step=step, options=options)


def records_of_samples(
    samples: Iterable[Any], *, step: int = 0, options: ImportOptions | None = None
) -> Iterator[Record | Dropped]:
    """The records of `Sample` objects or their dictionaries, in groups or not.

    Reads `rollout_routed_experts`, `tokens`, `response_length`, and the source of the prompt in `metadata`
    (data_source, domain, dataset, rm_type). Flat ids are shaped by `options.num_layers` and `options.top_k`.
    """
    count = with_routes = 0
    for sample in samples_of(samples):
        ids = field(sample, KEY)
        tokens = field(sample, "tokens")
        if ids is None or tokens is None:
            yield WITHOUT_ROUTES
        else:
            yield _record(sample, ids, tokens, f"sample {count}", step, options or ImportOptions())
            with_routes += 1
        count += 1
    if count and not with_routes:
        raise InputError(
            f"none of its {count} samples has {KEY!r}; run slime or miles with --use-rollout-routing-replay"
        )


def _record(sample: Any, ids: Any, tokens: Any, where: str, step: int, options: ImportOptions) -> Record:
    tokens = tokens if isinstance(tokens, list | tuple) else integers(tokens, f"{where}: tokens", 1)
    length = whole_number(field(sample, "response_length"), len(tokens))
    metadata = field(sample, "metadata")
    labels = [text(metadata.get(key)) for key in _DOMAIN_KEYS] if isinstance(metadata, Mapping) else []
    return Record(
        ids,
        where,
        read=partial(_shaped, options=options),
        num_tokens=len(tokens),
        prompt_length=max(0, len(tokens) - length),
        tokens=(tokens,),
        step=step,
        domain=next((label for label in labels if label), ""),
    )


def _shaped(ids: Any, options: ImportOptions) -> Array:
    """`[t, layers, K]`, also from flat ids or `[t, layers * K]`."""
    array = as_array(ids, KEY)
    if array.dtype.kind in "iu" and array.ndim in (1, 2):
        return shape_flat(array, options, KEY)
    return integers(array, KEY, 3)


def samples_of(samples: Any, depth: int = 0) -> Iterator[Any]:
    """The samples of lists of samples or of groups of samples; groups may be nested."""
    for sample in samples:
        if not isinstance(sample, list | tuple):
            yield sample
        elif depth == _DEEPEST_GROUP:
            raise InputError("its samples are nested too deeply")
        else:
            yield from samples_of(sample, depth + 1)


def _from_columns(columns: Any) -> list[dict[str, Any]]:
    """Samples of training data, which has a list for each field."""
    names = {KEY: KEY, "tokens": "tokens", "response_lengths": "response_length", "metadata": "metadata"}
    lists = {new: field(columns, old) for old, new in names.items()}
    routes = lists[KEY]
    if not isinstance(routes, list | tuple):
        raise InputError(f"{KEY} is a {type(routes).__name__}; it should be a list, one entry a sample")
    return [
        {name: values[row] for name, values in lists.items() if isinstance(values, list | tuple) and row < len(values)}
        for row in range(len(routes))
    ]
