"""Output of vLLM with `enable_return_routed_experts`: responses of its server, its outputs in memory, arrays.

`routed_experts` of a completion is `[num_tokens - 1, num_hidden_layers, top_k]`, uint8 or uint16, prompt included; over
HTTP base64 of the `.npy` bytes. Layers without experts are filled with zeros. vLLM 0.21 gave int16, of MoE layers only,
and the prompt separately: `prompt_routed_experts` of the request, `routed_experts` of each completion; over HTTP nested
lists.

Arrays saved by users: `.npy` of one sequence `[t, L, K]` or `[t, L * K]`, or of a padded batch `[S, t, L, K]`; `.npz`
with `routed_experts` of these shapes, and if several sequences follow one another in one, `sequence_starts` or
`lengths`. In a batch `lengths` gives their lengths; without it, rows of equal ids at both ends are padding.
`prompt_lengths` and `steps` are read too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.errors import InputError
from trimtab.trace.containers.array_files import array_names, open_arrays
from trimtab.trace.containers.json_values import json_head, json_values
from trimtab.trace.formats import verl
from trimtab.trace.formats.arrays import sequences
from trimtab.trace.formats.records import Dropped, ImportOptions, Record
from trimtab.trace.formats.responses import (
    WITHOUT_ROUTES,
    Response,
    decode_routes,
    first_given,
    require_routes,
    responses_in,
    token_count,
    tokens,
)
from trimtab.trace.message_text import at_place, kind_of

ROUTES = "routed_experts"
PROMPT_ROUTES = "prompt_routed_experts"


def recognise(path: Path) -> bool:
    """True for an array file with `routed_experts`, or JSON with that key near its start and none of SGLang's keys."""
    names = array_names(path)
    if names == [""]:
        with path.open("rb") as file:
            return b"'descr': '|O'" not in file.read(128)
    if names is not None:
        return ROUTES in names and verl.BATCH.isdisjoint(names)
    head = json_head(path)
    named = b'"routed_experts"' in head or b'"prompt_routed_experts"' in head
    return named and b'"meta_info"' not in head and b'"sglext"' not in head


def read(path: Path, options: ImportOptions) -> Iterator[Record | Dropped]:
    """Records of a file of responses (JSON lines, a list, or one; plain or in a client's wrapper) or of arrays."""
    if array_names(path) is not None:
        return _read_arrays(path, options)
    return require_routes(_records(json_values(path), options))


def records_of_outputs(outputs: Iterable[Any], options: ImportOptions | None = None) -> Iterator[Record | Dropped]:
    """Records of the output of `LLM.generate`.

    Args:
        outputs: `RequestOutput`s, or anything with its attributes or keys: `prompt_token_ids`, `outputs` with
            `token_ids` and `routed_experts`; in vLLM 0.21 also `prompt_routed_experts`.
    """
    values = ((f"output {index}", _fields(output)) for index, output in enumerate(outputs))
    return require_routes(_records(values, options or ImportOptions()))


def _records(values: Iterable[tuple[str, Any]], options: ImportOptions) -> Iterator[Record | Dropped]:
    for response in responses_in(values):
        content = response.content
        choices = first_given(content, "choices", "outputs")
        if choices is None:
            yield _completion(content, {}, response, response.where, options)
            continue
        if not isinstance(choices, list | tuple):
            raise InputError(f"{response.where}: choices are {kind_of(choices)}; expected a list")
        usage = content.get("usage")
        counts = usage if len(choices) == 1 and isinstance(usage, Mapping) else {}
        for index, choice in enumerate(choices):
            yield _completion(_fields(choice), counts, response, f"{response.where}, choice {index}", options)


def _completion(
    choice: Mapping[str, Any], usage: Mapping[str, Any], response: Response, where: str, options: ImportOptions
) -> Record | Dropped:
    """The record of one completion.

    Args:
        usage: token counts, if they are those of this completion alone.
    """
    split = any(PROMPT_ROUTES in source for source in (choice, response.content))
    before = first_given(choice, PROMPT_ROUTES, default=response.content.get(PROMPT_ROUTES))
    with at_place(where):
        # Nested lists without rows have no shape.
        given = [routes for routes in (before, choice.get(ROUTES)) if routes is not None]
        found = [routes for routes in given if not isinstance(routes, list | tuple) or routes]
        parts = [decode_routes(routes, options) for routes in found]
        if not parts:
            return WITHOUT_ROUTES
        if len({part.shape[1:] for part in parts}) > 1:
            raise InputError(
                f"the prompt's routes are {parts[0].shape[1:]} a token, the completion's {parts[1].shape[1:]}"
            )
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        prompt = tokens(first_given(choice, "prompt_token_ids", default=response.prompt_ids))
        output = tokens(choice.get("token_ids"))
        prompt_length = token_count(usage, "prompt_tokens") if prompt is None else len(prompt)
        if prompt_length is None and before is not None:
            prompt_length = len(parts[0]) if found[0] is before else 0
        output_length = token_count(usage, "completion_tokens") if output is None else len(output)
        of_output = split and before is None and output_length is not None and len(ids) == output_length - 1
        # prime-rl's server puts it beside the ids (prime_rl/inference/vllm/routed_experts.py:31 at 559b4477).
        start = token_count(found[0], "start") if isinstance(found[0], Mapping) else None
        first = prompt_length if of_output else start
        # An array of the engine itself is read later.
        source = found[0] if len(found) == 1 and hasattr(found[0], "dtype") else ids
        return response.record(source, where, (prompt, output), (prompt_length, output_length), first)


def _fields(value: Any) -> Mapping[str, Any]:
    """A mapping as it is, the attributes of anything else that are read here as a dictionary."""
    if isinstance(value, Mapping):
        return value
    names = ("prompt_token_ids", PROMPT_ROUTES, "outputs", "token_ids", ROUTES, "domain", "data_source", "step")
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _read_arrays(path: Path, options: ImportOptions) -> Iterator[Record]:
    with open_arrays(path) as arrays:
        yield from sequences(arrays, ROUTES if ROUTES in arrays else "", options)
