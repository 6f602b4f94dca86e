"""Responses of vLLM and SGLang: the response inside a client's wrapper, its labels, and its token counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.formats.records import Dropped, Record, require_records
from trimtab.trace.message_text import kind_of

WITHOUT_ROUTES = Dropped("responses without routed_experts")
# Keys under which clients store a server's response with data of the request, outermost first.
_WRAPPERS = ("response", "body", "result")


@dataclass(frozen=True)
class Response:
    """A server's response, and the data stored with it.

    Attributes:
        where: the place in the source.
        content: the response itself.
        domain, step: from the response or its wrapper.
        prompt_ids: of the request, if present.
    """

    where: str
    content: Mapping[str, Any]
    domain: str = ""
    step: int = 0
    prompt_ids: Any = None


def responses_in(values: Iterable[tuple[str, Any]]) -> Iterator[Response]:
    """Yields the responses in values, given with their places. A value is a response or a list of responses."""
    for where, value in values:
        if isinstance(value, list | tuple):
            for index, part in enumerate(value):
                yield _unwrap(f"{where}, response {index}", part)
        else:
            yield _unwrap(where, value)


def _unwrap(where: str, value: Any) -> Response:
    """The response inside `{"custom_id": ..., "response": {"body": {...}}}` and the like."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {kind_of(value)}; expected a response, an object with routed_experts")
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
        prompt_ids = first_given(layer, "input_ids", "prompt_token_ids", default=prompt_ids)
    return Response(where, layers[-1], domain, step, prompt_ids)


def first_given(source: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    """The value of the first of several keys that is not None."""
    return next((source[key] for key in keys if source.get(key) is not None), default)


def token_count(source: Mapping[str, Any], key: str) -> int | None:
    """A number of tokens, None if missing.

    Raises:
        InputError: if it is not a valid number.
    """
    value = source.get(key)
    if value is None:
        return None
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        text = "out of range" if type(value) is int else kind_of(value)
        raise InputError(f"{key} is {text}; it should be a number of tokens")
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


def record_of(
    source: Any,
    response: Response,
    where: str,
    prompt: Array | None,
    output: Array | None,
    prompt_length: int | None,
    output_length: int | None,
    first: int,
) -> Record:
    """The record of one completion.

    Args:
        source: of ids `[t, layers, K]`, from token `first` on.
        prompt, output: token ids, None if unknown.
        prompt_length, output_length: tokens, None if unknown.
    """
    return Record(
        source,
        where,
        missing="inferred",
        first=first,
        num_tokens=None if prompt_length is None or output_length is None else prompt_length + output_length,
        prompt_length=prompt_length or 0,
        tokens=() if prompt is None or output is None else (prompt, output),
        step=response.step,
        domain=response.domain,
    )


def require_routes(items: Iterable[Record | Dropped]) -> Iterator[Record | Dropped]:
    """Yields the same items; raises InputError if no response has routes."""
    return require_records(
        items,
        "no response holds routed_experts; vLLM and SGLang return them with --enable-return-routed-experts, SGLang if "
        "the request says return_routed_experts",
    )
