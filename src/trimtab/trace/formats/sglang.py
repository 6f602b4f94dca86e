"""Responses of SGLang with `return_routed_experts`: of `/generate`, of the engine, and OpenAI-compatible ones.

`meta_info["routed_experts"]` (or `sglext`, in OpenAI-compatible responses) is base64 of raw numbers `[tokens - 1 -
start, num_hidden_layers, top_k]`, int32 unless `routed_experts_dtype` says otherwise, from the token
`routed_experts_start_len` of the request on. `sglext` may have the token ids, too, and comes with the last chunk of a
stream (sglang/srt/entrypoints/openai/protocol.py of 0.5.23, `SglExt`). Layers without experts are filled with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers.json_values import json_head, json_values
from trimtab.trace.formats.records import Dropped, ImportOptions, Record
from trimtab.trace.formats.responses import (
    WITHOUT_ROUTES,
    Response,
    decode_routes,
    raw_dtype,
    require_routes,
    responses_in,
    token_count,
    tokens,
)
from trimtab.trace.message_text import at_place, kind_of


def recognise(path: Path) -> bool:
    """True if SGLang's own keys are near the start of the file."""
    head = json_head(path)
    return b'"meta_info"' in head or b'"sglext"' in head


def read(path: Path, options: ImportOptions) -> Iterator[Record | Dropped]:
    """Records of a file of responses: JSON lines, a list, or one; plain, or inside a client's wrapper."""
    return require_routes(_records(json_values(path), options))


def records_of_responses(
    responses: Iterable[Any] | Mapping[str, Any], options: ImportOptions
) -> Iterator[Record | Dropped]:
    """Records of the engine's `generate` output, or of decoded responses.

    Args:
        responses: one response or several, or a list for each request.
        options: layers and top_k.
    """
    values = [responses] if isinstance(responses, Mapping) else responses
    return require_routes(_records(((f"response {index}", value) for index, value in enumerate(values)), options))


def _records(values: Iterable[tuple[str, Any]], options: ImportOptions) -> Iterator[Record | Dropped]:
    for response in responses_in(values):
        content = response.content
        choices = content.get("choices")
        if not isinstance(choices, list):
            yield _completion(content.get("meta_info"), content.get("output_ids"), response, response.where, options)
            continue
        usage = content.get("usage")
        counts = dict(usage) if isinstance(usage, Mapping) else {}
        if len(choices) != 1:
            counts.pop("completion_tokens", None)  # of all choices together
        # The last chunk of a stream has no choice, and what is beside them.
        for index, choice in enumerate(choices or [{}]):
            where = f"{response.where}, choice {index}"
            if not isinstance(choice, Mapping):
                raise InputError(f"{where}: {kind_of(choice)}; expected an object")
            meta: dict[str, Any] = dict(counts)
            # Routes stored next to several choices are those of the first.
            beside = content.get("sglext") if index == 0 else None
            for extra in (beside, choice.get("sglext"), choice.get("meta_info")):
                meta |= extra if isinstance(extra, Mapping) else {}
            yield _completion(meta, choice.get("token_ids"), response, where, options)


def _completion(meta: Any, output_ids: Any, response: Response, where: str, options: ImportOptions) -> Record | Dropped:
    routes = meta.get("routed_experts") if isinstance(meta, Mapping) else None
    if routes is None:
        return WITHOUT_ROUTES
    with at_place(where):
        ids = decode_routes(routes, options, raw_dtype(meta.get("routed_experts_dtype") or "int32"))
        if output_ids is None and isinstance(meta.get("output_ids"), list) and len(meta["output_ids"]) == 1:
            (output_ids,) = meta["output_ids"]
        given = response.prompt_ids if response.prompt_ids is not None else meta.get("input_ids")
        prompt, output = tokens(given), _output_ids(meta, output_ids)
        prompt_length = token_count(meta, "prompt_tokens")
        if prompt_length is None and prompt is not None:
            prompt_length = len(prompt)
        output_length = token_count(meta, "completion_tokens")
        if output_length is None and output is not None:
            output_length = len(output)
        first = token_count(meta, "routed_experts_start_len")
        return response.record(ids, where, (prompt, output), (prompt_length, output_length), first)


def _output_ids(meta: Mapping[str, Any], output_ids: Any) -> Array | None:
    """Ids of the generated tokens: beside `meta_info`, or in `output_token_logprobs` as (logprob, id, text)."""
    if output_ids is not None:
        return tokens(output_ids)
    pairs = meta.get("output_token_logprobs")
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) > 1 for pair in pairs):
        return None
    return tokens([pair[1] for pair in pairs])
