"""Output of vLLM with `enable_return_routed_experts`: responses of its server, its outputs in memory, arrays.

`routed_experts` of a completion is `[num_tokens - 1, num_hidden_layers, top_k]`, uint8 or uint16, prompt included; over
HTTP base64 of the `.npy` bytes. Layers without experts are filled with zeros. vLLM 0.21 gave int16, of MoE layers only,
and the prompt separately: `prompt_routed_experts` of the request, `routed_experts` of each completion; over HTTP nested
lists.

Arrays saved by users: `.npy` of one sequence `[t, L, K]` or of a padded batch `[S, t, L, K]`; `.npz` with
`routed_experts` of either shape, and if several sequences follow one another in one, `sequence_starts` or `lengths`.
In a batch `lengths` gives their lengths; without it, rows of zeros or -1 at both ends are padding. `prompt_lengths` and
`steps` are read too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers.array_files import Arrays, array_names, open_arrays
from trimtab.trace.containers.json_values import json_head
from trimtab.trace.formats.records import ImportOptions, Record
from trimtab.trace.formats.responses import (
    WITHOUT_ROUTES,
    Response,
    count,
    joined,
    placed,
    read_responses,
    report_dropped,
    tokens,
    unwrap,
)
from trimtab.trace.formats.routes import check_ids, decode_routes, missing_id, trim_padding
from trimtab.trace.message_text import kind_of

ROUTES = "routed_experts"


def recognise(path: Path) -> bool:
    """True for an array file with `routed_experts`, or JSON with that key near its start and none of SGLang's keys."""
    names = array_names(path)
    if names is not None:
        return names == [""] or ROUTES in names
    head = json_head(path)
    named = b'"routed_experts"' in head or b'"prompt_routed_experts"' in head
    return named and b'"meta_info"' not in head and b'"sglext"' not in head


def read(path: Path, options: ImportOptions) -> Iterator[Record]:
    """Records of a file of responses (JSON lines, a list, or one; plain or in a client's wrapper) or of arrays.

    Raises:
        InputError: if it isn't that.
    """
    if array_names(path) is not None:
        return _read_arrays(path)
    return read_responses(path, lambda response: _records(response, options))


def records_of_outputs(outputs: Iterable[Any], options: ImportOptions | None = None) -> Iterator[Record]:
    """Records of the output of `LLM.generate`.

    Args:
        outputs: `RequestOutput`s, or anything with its attributes or keys: `prompt_token_ids`, `outputs` with
            `token_ids` and `routed_experts`; in vLLM 0.21 also `prompt_routed_experts`.

    Raises:
        InputError: if routed_experts are missing or not in vLLM's form.
    """
    model = options or ImportOptions()

    def found() -> Iterator[Record | str]:
        for index, output in enumerate(outputs):
            response = unwrap(output) if isinstance(output, Mapping) else unwrap(_fields(output))
            yield from placed(f"output {index}", _records(response, model))

    return report_dropped(found())


def _records(response: Response, options: ImportOptions) -> Iterator[Record | str]:
    content = response.content
    choices = next((content[key] for key in ("choices", "outputs") if content.get(key) is not None), None)
    if choices is None:
        yield from _one(content, content, response, {}, options)
        return
    if not isinstance(choices, list | tuple):
        raise InputError(f"choices are {kind_of(choices)}; expected a list")
    usage = content.get("usage")
    alone = len(choices) == 1 and isinstance(usage, Mapping)
    for index, choice in enumerate(choices):
        fields = choice if isinstance(choice, Mapping) else _fields(choice)
        yield from placed(f"choice {index}", _one(fields, content, response, usage if alone else {}, options))


def _one(
    choice: Mapping[str, Any], content: Mapping[str, Any], response: Response, usage: Any, options: ImportOptions
) -> Iterator[Record | str]:
    """The record of one completion.

    Args:
        usage: token counts, if they are those of this completion alone.
    """
    before = next(
        (c["prompt_routed_experts"] for c in (choice, content) if c.get("prompt_routed_experts") is not None), None
    )
    after = choice.get(ROUTES)
    if before is None and after is None:
        yield WITHOUT_ROUTES
        return
    parts = [decode_routes(part, options) for part in (before, after) if part is not None and not _no_rows(part)]
    if not parts:
        yield WITHOUT_ROUTES
        return
    if len({part.shape[1:] for part in parts}) > 1:
        raise InputError(f"the prompt's routes are {parts[0].shape[1:]} a token, the completion's {parts[1].shape[1:]}")
    ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
    prompt = tokens(choice["prompt_token_ids"] if choice.get("prompt_token_ids") is not None else response.prompt_ids)
    output = tokens(choice.get("token_ids"))
    prompt_length = count(usage.get("prompt_tokens"), "prompt_tokens") if prompt is None else len(prompt)
    if prompt_length is None and before is not None:
        prompt_length = len(parts[0]) if not _no_rows(before) else 0
    completion = count(usage.get("completion_tokens"), "completion_tokens") if output is None else len(output)
    apart = any("prompt_routed_experts" in each for each in (choice, content))
    of_completion = apart and before is None and completion is not None and len(ids) == completion - 1
    yield Record(
        ids=ids,
        where="",
        missing=missing_id(ids),
        first=prompt_length or 0 if of_completion else 0,
        num_tokens=None if prompt_length is None or completion is None else prompt_length + completion,
        prompt_length=prompt_length or 0,
        token_ids=joined(prompt, output),
        step=response.step,
        domain=response.domain,
    )


def _fields(thing: Any) -> Mapping[str, Any]:
    """The attributes that are read here, as a dictionary."""
    names = (
        "prompt_token_ids",
        "prompt_routed_experts",
        "outputs",
        "token_ids",
        ROUTES,
        "domain",
        "data_source",
        "step",
    )
    return {name: getattr(thing, name) for name in names if hasattr(thing, name)}


def _no_rows(routes: Any) -> bool:
    """True for nested lists without rows, which have no shape."""
    return isinstance(routes, list | tuple) and len(routes) == 0


def _read_arrays(path: Path) -> Iterator[Record]:
    with open_arrays(path) as arrays:
        name = ROUTES if ROUTES in arrays.shapes else ""
        shape = arrays.shapes.get(name, ())
        if len(shape) == 4:
            yield from _batch(arrays, name)
        elif len(shape) == 3:
            yield from _row(arrays, name)
        else:
            raise InputError(
                f"routed_experts has shape {list(shape)}; it should be [tokens, layers, top_k] or [sequences, tokens, "
                "layers, top_k]"
            )


def _row(arrays: Arrays, name: str) -> Iterator[Record]:
    """Concatenated sequences."""
    total = arrays.shapes[name][0]
    lengths = _lengths(arrays, total)
    prompts, steps = _facts(arrays, len(lengths))
    rows = arrays.rows(name)
    for index, length in enumerate(lengths.tolist()):
        ids = check_ids(rows(length))
        if ids.size == 0 and 0 in ids.shape[1:]:
            raise InputError(
                f"routed_experts has shape {list(arrays.shapes[name])}; it should be [tokens, layers, top_k]"
            )
        yield Record(
            ids=ids,
            where=f"sequence {index}",
            missing=missing_id(ids),
            prompt_length=int(prompts[index]),
            step=int(steps[index]),
        )


def _batch(arrays: Arrays, name: str) -> Iterator[Record]:
    """Sequences in a batch, padded to one length."""
    sequences, padded, *_ = shape = arrays.shapes[name]
    if 0 in shape[1:]:
        raise InputError(f"routed_experts has shape {list(shape)}; it should be [sequences, tokens, layers, top_k]")
    lengths = arrays.small("lengths") if "lengths" in arrays.shapes else None
    if lengths is not None and (
        len(lengths) != sequences or lengths.min(initial=0) < 0 or lengths.max(initial=0) > padded
    ):
        raise InputError(f"lengths should be {sequences} numbers of 0 to {padded}")
    prompts, steps = _facts(arrays, sequences)
    rows = arrays.rows(name)
    for index in range(sequences):
        ids = check_ids(rows(1)[0])
        if lengths is None:
            ids, dropped = trim_padding(ids)
        else:
            ids, dropped = ids[: lengths[index]], padded - int(lengths[index])
        yield Record(
            ids=ids,
            where=f"sequence {index}",
            missing=missing_id(ids),
            prompt_length=int(prompts[index]),
            step=int(steps[index]),
            dropped={"padding rows": dropped} if dropped else {},
        )


def _lengths(arrays: Arrays, total: int) -> Array:
    """`[S]` tokens of each of the concatenated sequences, `total` together."""
    if "sequence_starts" in arrays.shapes:
        starts = arrays.small("sequence_starts").astype(np.int64)
        if len(starts) and starts[0] == 0 and starts[-1] != total:
            starts = np.append(starts, total)  # without the end
        if len(starts) < 1 or starts[0] != 0 or starts[-1] != total or (np.diff(starts) < 0).any():
            raise InputError(f"sequence_starts should rise from 0 to the number of tokens, {total}")
        return np.diff(starts)
    if "lengths" in arrays.shapes:
        lengths = arrays.small("lengths").astype(np.int64)
        if lengths.min(initial=0) < 0 or lengths.max(initial=0) > total or lengths.sum() != total:
            raise InputError(f"lengths should add up to the number of tokens, {total}")
        return lengths
    return np.array([total])


def _facts(arrays: Arrays, sequences: int) -> tuple[Array, Array]:
    """Prompt lengths and steps `[S]`, zeros if not given."""
    found = []
    for name in ("prompt_lengths", "steps"):
        values = arrays.small(name) if name in arrays.shapes else np.zeros(sequences, np.int64)
        if len(values) != sequences or values.min(initial=0) < 0 or values.max(initial=0) >= 1 << 31:
            raise InputError(f"{name} should be {sequences} whole numbers, one a sequence")
        found.append(values)
    return found[0], found[1]
