"""Responses of vLLM and SGLang: the response inside a client's wrapper, its labels, token counts and routes."""

from __future__ import annotations

import binascii
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers.tensors import NPY_MAGIC, array_of_npy
from trimtab.trace.formats.dump_fields import array_of_lists
from trimtab.trace.formats.records import Dropped, ImportOptions, Record, require_records
from trimtab.trace.message_text import at_place, kind_of, reason, short

ROUTES = "routed_experts"
NO_ROUTES = (
    "no response holds routed_experts; vLLM and SGLang return them with --enable-return-routed-experts, SGLang if the "
    "request says return_routed_experts"
)
WITHOUT_ROUTES = Dropped("responses without routed_experts")
# The token of the first row, in a request: a field of SGLang's `GenerateReqInput` (sglang/srt/managers/io_struct.py at
# 001067ff), which its responses do not repeat, and of vLLM's `CompletionRequest` and `SamplingParams`
# (vllm/entrypoints/openai/completion/protocol.py at 002032ee, pull request 51906). miles stores SGLang's requests
# beside their responses (miles/rollout/session/types.py at 31f1ca96).
STARTS = ("routed_experts_start_len", "routed_experts_prompt_start")
# Keys under which clients store a server's response with data of the request, outermost first.
_WRAPPERS = ("response", "body", "result")
# NeMo-RL's "nrlre1:int8:49x48x8:<base64>" (nemo_rl/utils/routed_experts_codec.py at 7ea279ab).
_ENVELOPE = re.compile(r"nrlre1:(\w{1,9}):(\d{1,9})x(\d{1,9})x(\d{1,9}):")
_RAW_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
# With a shape but no dtype, the size of a number gives the dtype. Signed, so -1 stays -1.
_DTYPE_OF_SIZE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Response:
    """A server's response, and the data stored with it.

    Attributes:
        where: the place in the source.
        content: the response itself.
        domain, step: from the response or its wrapper.
        prompt_ids: of the request, if present.
        start: the token of the first row that was requested; None if the request is not there or does not tell.
    """

    where: str
    content: Mapping[str, Any]
    domain: str = ""
    step: int = 0
    prompt_ids: Any = None
    start: int | None = None

    def record(
        self,
        source: Any,
        where: str,
        tokens: tuple[Array | None, Array | None],
        lengths: tuple[int | None, int | None],
        first: int | None,
    ) -> Record:
        """The record of one completion.

        Args:
            source: of ids `[t, layers, K]`, from token `first` on.
            tokens, lengths: of the prompt and of the output; None where they are unknown.
            first: None if the response does not tell; then as requested.

        Raises:
            InputError: if the rows are not those from `first` on to the end.
        """
        prompt, output = lengths
        num_tokens = None if prompt is None or output is None else prompt + output
        first = self.start if first is None else first
        if first and num_tokens is not None and first + len(source) != num_tokens - 1:
            raise InputError(
                f"its rows begin at token {first} of {num_tokens}, so there should be {num_tokens - 1 - first}; there "
                f"are {len(source)}"
            )
        return Record(
            source,
            where,
            first=first or 0,
            placed=bool(first),
            num_tokens=num_tokens,
            prompt_length=prompt or 0,
            tokens=() if tokens[0] is None or tokens[1] is None else tokens,
            step=self.step,
            domain=self.domain,
            model=str(self.content.get("model") or ""),
        )


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
    domain, step, prompt_ids, start = "", 0, None, None
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
        for source in (layer.get("request"), layer):
            if isinstance(source, Mapping):
                prompt_ids = first_given(source, "input_ids", "prompt_token_ids", default=prompt_ids)
                with at_place(where):
                    start = _requested_start(source, start)
    return Response(where, layers[-1], domain, step, prompt_ids, start)


def _requested_start(request: Mapping[str, Any], default: int | None) -> int | None:
    """The token of the first row that a request asks for, itself or in its extra arguments."""
    for part in (request, request.get("sampling_params"), request.get("extra_body")):
        stated = part if isinstance(part, Mapping) else {}
        for key in STARTS:
            if (start := token_count(stated, key)) is not None:
                return start
    return default


def first_given(source: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    """The value of the first of several keys that is not None."""
    return next((source[key] for key in keys if source.get(key) is not None), default)


def token_count(source: Mapping[str, Any], key: str) -> int | None:
    """A number of tokens, None if missing. Raises InputError if it is not a valid number."""
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


def require_routes(items: Iterable[Record | Dropped]) -> Iterator[Record | Dropped]:
    """Yields the same items; raises InputError if no response has routes."""
    return require_records(items, NO_ROUTES)


def decode_routes(value: Any, options: ImportOptions, dtype: str = "int32") -> Array:
    """Decodes ids `[t, layers, K]` of a response.

    Args:
        value: base64 of `.npy` bytes (vLLM); base64 of raw numbers (SGLang), whose shape comes from `options`;
            `{"data": base64, "shape": [t, layers, K], "dtype": ...}` or NeMo-RL's text of these; nested
            lists (vLLM 0.21); or an array.
        options: for raw numbers, number of layers and top_k.
        dtype: of raw numbers.

    Raises:
        InputError: if it is none of these formats, or sizes don't fit.
    """
    if isinstance(value, str) and (envelope := _ENVELOPE.match(value)):
        shape = [int(length) for length in envelope.groups()[1:]]
        value = {"dtype": envelope[1], "shape": shape, "data": value[envelope.end() :]}
    if isinstance(value, str):
        data = _decoded(value)
        ids = array_of_npy(data, ROUTES) if data.startswith(NPY_MAGIC) else shape_flat(_raw(data, dtype), options)
    elif isinstance(value, Mapping):
        ids = _array_of_mapping(value, dtype)
    elif isinstance(value, list | tuple):
        ids = array_of_lists(value, 3)
    else:
        ids = _plain_array(value)
    if ids.ndim != 3 or 0 in ids.shape[1:]:
        raise InputError(f"routed_experts has shape {list(ids.shape)}; it should be [tokens, layers, top_k]")
    return check_ids(ids)


def check_ids(ids: Array) -> Array:
    """The ids, in this machine's byte order. Raises InputError unless they are integers."""
    if ids.dtype.kind not in "iu":
        raise InputError(f"ids are {ids.dtype}; they should be integers")
    return ids if ids.dtype.isnative else ids.astype(ids.dtype.newbyteorder("="))


def raw_dtype(name: Any) -> str:
    """The declared dtype. Raises InputError if it is not a dtype of ids."""
    if not isinstance(name, str) or name.strip().lower() not in _RAW_DTYPES:
        raise InputError(f"routed_experts_dtype is {short(name)}; it should be one of {', '.join(_RAW_DTYPES)}")
    return name.strip().lower()


def shape_flat(flat: Array, options: ImportOptions, what: str = "routed_experts") -> Array:
    """`[t, layers, K]` of ids one after another or `[t, layers * K]`, with the caller's numbers of layers and top_k.

    Raises:
        InputError: if one is unknown, or they don't divide the number of ids.
    """
    layers, top_k = options.num_layers, options.top_k
    if not layers or not top_k:
        missing = " and ".join(name for name, value in (("--num-layers", layers), ("--top-k", top_k)) if not value)
        found = f"shape {list(flat.shape)}, not [tokens, layers, top_k]" if flat.ndim == 2 else "no shape"
        raise InputError(f"{what} has {found}; give {missing}, or --model with a config.json or a model's name")
    if flat.ndim == 2 and flat.shape[1] != layers * top_k:
        raise InputError(
            f"{what} has shape {list(flat.shape)}; it should be [tokens, {layers} layers, top-{top_k}], or "
            f"[tokens, {layers * top_k}]"
        )
    if flat.size % (layers * top_k):
        raise InputError(
            f"{what} holds {flat.size} ids of {flat.dtype}, which {layers} layers x top-{top_k} don't divide"
        )
    return flat.reshape(-1, layers, top_k)


def _decoded(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise InputError(f"routed_experts is not valid base64 ({reason(error)})") from None


def _raw(data: bytes, dtype: str) -> Array:
    kind = np.dtype(dtype).newbyteorder("<")
    if len(data) % kind.itemsize:
        raise InputError(f"routed_experts has {len(data)} bytes, which is no whole number of {dtype}")
    return np.frombuffer(data, kind)


def _array_of_mapping(value: Mapping[str, Any], default: str) -> Array:
    data, shape, dtype = value.get("data"), value.get("shape"), value.get("dtype")
    if not isinstance(data, str):
        raise InputError("routed_experts has no base64 'data'")
    content = _decoded(data)
    if content.startswith(NPY_MAGIC):
        return array_of_npy(content, ROUTES)
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise InputError("routed_experts has no 'shape' [tokens, layers, top_k]")
    count = math.prod(shape)
    if dtype is None:
        dtype = np.dtype(_DTYPE_OF_SIZE.get(len(content) // count, default)).name if count else default
    flat = _raw(content, raw_dtype(dtype))
    if len(flat) != count:
        raise InputError(f"routed_experts claims shape {short(shape)} of {dtype}; there are {len(content)} bytes")
    return flat.reshape(shape)


def _plain_array(value: Any) -> Array:
    """An array or tensor on the CPU."""
    if isinstance(value, bytes | bytearray):
        return array_of_npy(bytes(value), ROUTES)
    try:
        array = np.asarray(value)
    except Exception as error:  # whatever a tensor of another library raises
        raise InputError(f"routed_experts is a {type(value).__name__}, not an array ({reason(error)})") from None
    return array
