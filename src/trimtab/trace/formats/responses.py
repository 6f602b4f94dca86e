"""Shared by responses of vLLM and SGLang: wrappers, labels, token counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers.json_values import json_values
from trimtab.trace.formats.records import Record
from trimtab.trace.message_text import kind_of

WITHOUT_ROUTES = "responses without routed_experts"
# Keys under which clients store a server's response with data of the request, outermost first.
_WRAPPERS = ("response", "body", "result")


@dataclass(frozen=True)
class Response:
    """A server's response, and the data stored with it.

    Attributes:
        content: the response itself.
        domain, step: from the response or its wrapper.
        prompt_ids: of the request, if present.
    """

    content: Mapping[str, Any]
    domain: str = ""
    step: int = 0
    prompt_ids: Any = None


def responses_of(value: Any) -> Iterator[tuple[str, Response]]:
    """The responses in a JSON value or an object in memory: one, or lists of them. With the place inside, or ""."""
    if not isinstance(value, list | tuple):
        yield "", unwrap(value)
        return
    for index, part in enumerate(value):
        if isinstance(part, list | tuple):
            raise InputError(f"response {index}: a list in a list; expected a response")
        yield f"response {index}", unwrap(part)


def unwrap(value: Any) -> Response:
    """The response inside `{"custom_id": ..., "response": {"body": {...}}}` and the like."""
    if not isinstance(value, Mapping):
        raise InputError(f"{kind_of(value)}; expected a response, an object with routed_experts")
    domain, step, prompt_ids = "", 0, None
    layers = [value]
    for key in _WRAPPERS:
        inner = layers[-1].get(key)
        if isinstance(inner, Mapping) and not {"choices", "meta_info", "routed_experts", "outputs"} & set(layers[-1]):
            layers.append(inner)
    for layer in layers:
        label = next((layer[key] for key in ("domain", "data_source") if isinstance(layer.get(key), str)), "")
        domain = label or domain
        number = layer.get("step")
        step = number if type(number) is int and 0 <= number < 1 << 31 else step
        for key in ("prompt_token_ids", "input_ids"):
            prompt_ids = layer[key] if layer.get(key) is not None else prompt_ids
    return Response(layers[-1], domain, step, prompt_ids)


def count(value: Any, name: str) -> int | None:
    """A number of tokens, None if missing.

    Raises:
        InputError: if it is not a valid number.
    """
    if value is None:
        return None
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        text = "out of range" if type(value) is int else kind_of(value)
        raise InputError(f"{name} is {text}; it should be a number of tokens")
    return int(value)


def tokens(value: Any) -> Array | None:
    """Token ids `[n]` int64, None if missing."""
    if value is None or isinstance(value, str | bytes | Mapping):
        return None
    try:
        ids = np.array(value if isinstance(value, np.ndarray) else list(value))
    except (TypeError, ValueError, OverflowError):
        return None
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        return None
    return ids.astype(np.int64)


def joined(prompt: Array | None, output: Array | None) -> Array | None:
    return None if prompt is None or output is None else np.concatenate([prompt, output])


def read_responses(path: Path, records: Callable[[Response], Iterable[Record | str]]) -> Iterator[Record]:
    """Records of a file of responses; see `report_dropped`."""

    def found() -> Iterator[Record | str]:
        for line, value in json_values(path):
            yield from placed(line, _all_of(value, records))

    yield from report_dropped(found())


def records_in(values: Iterable[Any], records: Callable[[Response], Iterable[Record | str]]) -> Iterator[Record]:
    """Records of responses in memory; see `report_dropped`."""

    def found() -> Iterator[Record | str]:
        for index, value in enumerate(values):
            yield from placed(f"response {index}", _all_of(value, records))

    yield from report_dropped(found())


def _all_of(value: Any, records: Callable[[Response], Iterable[Record | str]]) -> Iterator[Record | str]:
    for place, response in responses_of(value):
        yield from placed(place, records(response))


def placed(place: str, found: Iterable[Record | str]) -> Iterator[Record | str]:
    """Yields the same records, with a prefix for the places of records and errors."""
    try:
        for each in found:
            if isinstance(each, Record):
                each = replace(each, where=", ".join(filter(None, (place, each.where))))
            yield each
    except InputError as error:
        parts = str(error)
        inside = parts.startswith(("response ", "choice ", "output ")) and ":" in parts.split(" ", 2)[1]
        raise InputError(f"{place}{', ' if inside else ': '}{parts}" if place else parts) from None


NO_ROUTES_AT_ALL = (
    "no response holds routed_experts; vLLM and SGLang return them with --enable-return-routed-experts, SGLang if the "
    "request says return_routed_experts"
)


def report_dropped(found: Iterable[Record | str], *, nothing: str = NO_ROUTES_AT_ALL) -> Iterator[Record]:
    """Yields the records, each with the data left out since the one before; the last also with data left out after it.

    Args:
        found: records, and kinds of data left out.
        nothing: the error if there is no record.

    Raises:
        InputError: if there is no record at all.
    """
    waiting: Record | None = None
    dropped: dict[str, int] = {}
    for each in found:
        if isinstance(each, str):
            dropped[each] = dropped.get(each, 0) + 1
            continue
        if waiting is not None:
            yield waiting
        waiting, dropped = _with_dropped(each, dropped), {}
    if waiting is None:
        raise InputError(nothing)
    yield _with_dropped(waiting, dropped)


def _with_dropped(record: Record, more: Mapping[str, int]) -> Record:
    if not more:
        return record
    counts = dict(record.dropped)
    for reason, number in more.items():
        counts[reason] = counts.get(reason, 0) + number
    return replace(record, dropped=counts)
