"""Responses of SGLang with `return_routed_experts`: of `/generate`, of the engine, and OpenAI-compatible ones.

`meta_info["routed_experts"]` (or `sglext`, in OpenAI-compatible responses) is base64 of raw numbers `[tokens - 1 -
start, num_hidden_layers, top_k]`, int32 unless `routed_experts_dtype` says otherwise, from the token
`routed_experts_start_len` on. Layers without experts are filled with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers.json_values import json_head
from trimtab.trace.formats.records import ImportOptions, Record
from trimtab.trace.formats.responses import (
    WITHOUT_ROUTES,
    Response,
    count,
    joined,
    placed,
    read_responses,
    records_in,
    tokens,
)
from trimtab.trace.formats.routes import decode_routes, missing_id, raw_dtype
from trimtab.trace.message_text import kind_of


def recognise(path: Path) -> bool:
    """True if SGLang's own keys are near the start of the file."""
    head = json_head(path)
    return b'"meta_info"' in head or b'"sglext"' in head


def read(path: Path, options: ImportOptions) -> Iterator[Record]:
    """Records of a file of responses: JSON lines, a list, or one; plain, or inside a client's wrapper.

    Raises:
        InputError: if it isn't that, or `options` has no layers and top_k for ids without a shape.
    """
    return read_responses(path, lambda response: _records(response, options))


def records_of_responses(responses: Iterable[Any] | Mapping[str, Any], options: ImportOptions) -> Iterator[Record]:
    """Records of the engine's `generate` output, or of decoded responses.

    Args:
        responses: one response or several, or a list for each request.
        options: layers and top_k.
    """
    values = [responses] if isinstance(responses, Mapping) else responses
    return records_in(values, lambda response: _records(response, options))


def _records(response: Response, options: ImportOptions) -> Iterator[Record | str]:
    content = response.content
    choices = content.get("choices")
    if not isinstance(choices, list):
        yield from _one(content.get("meta_info"), content.get("output_ids"), response, options)
        return
    usage = content.get("usage")
    counts = dict(usage) if isinstance(usage, Mapping) else {}
    if len(choices) != 1:
        counts.pop("completion_tokens", None)  # of all choices together
    for index, choice in enumerate(choices):
        if not isinstance(choice, Mapping):
            raise InputError(f"choice {index}: {kind_of(choice)}; expected an object")
        meta: dict[str, Any] = dict(counts)
        # Routes stored next to several choices are those of the first.
        for key, source in (("sglext", content if index == 0 else {}), ("sglext", choice), ("meta_info", choice)):
            extra = source.get(key)
            meta |= extra if isinstance(extra, Mapping) else {}
        yield from placed(f"choice {index}", _one(meta, choice.get("token_ids"), response, options))


def _one(meta: Any, output_ids: Any, response: Response, options: ImportOptions) -> Iterator[Record | str]:
    routes = meta.get("routed_experts") if isinstance(meta, Mapping) else None
    if routes is None:
        yield WITHOUT_ROUTES
        return
    ids = decode_routes(routes, options, raw_dtype(meta.get("routed_experts_dtype") or "int32"))
    prompt, output = tokens(response.prompt_ids), _output_ids(meta, output_ids)
    prompt_length = count(meta.get("prompt_tokens"), "prompt_tokens")
    if prompt_length is None and prompt is not None:
        prompt_length = len(prompt)
    completion = count(meta.get("completion_tokens"), "completion_tokens")
    if completion is None and output is not None:
        completion = len(output)
    num_tokens = None if prompt_length is None or completion is None else prompt_length + completion
    both = joined(prompt, output)
    yield Record(
        ids=ids,
        where="",
        missing=missing_id(ids),
        first=count(meta.get("routed_experts_start_len"), "routed_experts_start_len") or 0,
        num_tokens=num_tokens,
        prompt_length=prompt_length or 0,
        token_ids=both if both is not None and len(both) == num_tokens else None,
        step=response.step,
        domain=response.domain,
    )


def _output_ids(meta: Mapping[str, Any], output_ids: Any) -> Array | None:
    """Ids of the generated tokens: beside `meta_info`, or in `output_token_logprobs` as (logprob, id, text)."""
    if output_ids is not None:
        return tokens(output_ids)
    pairs = meta.get("output_token_logprobs")
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) > 1 for pair in pairs):
        return None
    return tokens([pair[1] for pair in pairs])
