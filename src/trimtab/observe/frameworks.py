"""How each framework holds recorded routing: from its batch to `Sample`s, without reading their ids.

Samples are read later, on the observer's thread, by `trace/formats/`. Token ids are not kept: where a reader takes them
for their number, it is given zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.observe.borrowed import Borrowed, Room, fingerprint, size_of
from trimtab.observe.sample_reader import FREED, Sample
from trimtab.trace import ImportOptions
from trimtab.trace.formats import ms_swift, nemo_rl, roll, sglang, skyrl, slime, trl, verl, vllm
from trimtab.trace.formats.dump_fields import as_array, damaged_values, field, first_field, label_of
from trimtab.trace.formats.records import Dropped, Record

# Padding rows of a sample whose experts are looked at.
PADDING_ROWS = 16

Read = Callable[[Any], Iterable[Record | Dropped]]


@dataclass(frozen=True)
class Batch:
    """A batch of a framework.

    Attributes:
        content: the framework's object.
        room: for what is borrowed of it.
        options: facts of the model.
    """

    content: Any
    room: Room
    options: ImportOptions

    def array(self, ids: Any, read: Read) -> Sample:
        """A sample with an array or tensor `[t, layers, K]` of its own."""
        found = _on_host(ids)
        return Sample(Borrowed(ids, self.room), found.nbytes, _array, read, fingerprint(found))

    def whole(self, content: Any, read: Read) -> Sample:
        """A sample whose ids are no array yet, such as a response with text."""
        return Sample(Borrowed(content, self.room), size_of(content), lambda held: held, read)

    def rows(
        self,
        key: str,
        fields: Mapping[str, Any],
        read: Read,
        is_padding: Callable[[Mapping[str, Array]], Array] | None,
        labels: Any = None,
    ) -> Iterator[Sample]:
        """The rows of a padded batch.

        Args:
            key: of the routes `[B, T, layers, K]`.
            fields: other arrays and tensors `[B, ...]` that are read, by name; None if missing.
            read: from a row of all fields, each `[1, ...]`, to its records.
            is_padding: from a row of the other fields, without the first axis, to `[T]` bool.
            labels: of the rows.
        """
        routes = _field(self.content, key)
        ids_BTLK, owner = _on_host(routes), Borrowed(routes, self.room)
        held = {name: Borrowed(value, self.room) for name, value in fields.items() if value is not None}
        for row, ids_TLK in enumerate(ids_BTLK):
            others = _Row(held, row)
            yield Sample(
                owner,
                ids_TLK.nbytes,
                _Taken(row),
                _Joined(read, key, others),
                fingerprint(ids_TLK),
                None if is_padding is None else _Padding(others, is_padding),
                label_of(labels, row),
            )


@dataclass(frozen=True)
class _Taken:
    """From the routes of a padded batch to those of a row."""

    row: int

    def __call__(self, routes: Any) -> Array:
        row: Array = _array(routes)[self.row]
        return row


@dataclass(frozen=True)
class _Row:
    """A row of borrowed fields."""

    held: Mapping[str, Borrowed]
    row: int

    def fields(self) -> dict[str, Array]:
        """By name, `[1, ...]` each. Raises InputError if one is gone."""
        values = {name: borrowed.get() for name, borrowed in self.held.items()}
        if any(value is None for value in values.values()):
            raise InputError(FREED)
        return {name: as_array(value, name)[self.row : self.row + 1] for name, value in values.items()}


@dataclass(frozen=True)
class _Joined:
    """From a row's ids to its records, which need the row's other fields too."""

    read: Read
    key: str
    others: _Row

    def __call__(self, ids_TLK: Array) -> Iterable[Record | Dropped]:
        return self.read({self.key: ids_TLK[None], **self.others.fields()})


@dataclass(frozen=True)
class _Padding:
    """From a row's ids to those of some of its padding tokens."""

    others: _Row
    is_padding: Callable[[Mapping[str, Array]], Array]

    def __call__(self, ids_TLK: Array) -> Array:
        places = np.flatnonzero(self.is_padding({name: value[0] for name, value in self.others.fields().items()}))
        return ids_TLK[places[:: max(1, len(places) // PADDING_ROWS)]]


def _array(ids: Any) -> Array:
    return as_array(ids, "the routes")


def _on_host(ids: Any) -> Array:
    """The ids as an array, without a copy. Raises InputError if they are on a device."""
    device = getattr(getattr(ids, "device", None), "type", "cpu")
    if device != "cpu":
        raise InputError(f"the recorded routes are on a {device} device; hand them over as the rollout left them")
    return _array(ids)


def _field(batch: Any, key: str) -> Any:
    value = field(batch, key)
    if value is None:
        raise InputError(f"no {key!r} in the batch; was recording of routes turned on?")
    return value


def _zeros(count: int) -> Array:
    """Token ids of which only the number counts; they take no memory."""
    return np.broadcast_to(np.int64(0), (count,))


def _verl(batch: Batch) -> Iterator[Sample]:
    content = batch.content
    tensors = field(content, "batch", content)
    labels = field(field(content, "non_tensor_batch") or {}, "data_source")
    batch = Batch(tensors, batch.room, batch.options)
    routes = _field(tensors, verl.KEY)
    if getattr(routes, "is_nested", False):
        yield from _nested(batch, routes)
        return
    # Of prompts and responses, the columns count.
    fields = {name: field(tensors, name) for name in ("attention_mask", "prompts", "responses")}
    is_padding = None if fields["attention_mask"] is None else lambda row: row["attention_mask"] == 0
    yield from batch.rows(verl.KEY, fields, verl.records_of_batch, is_padding, labels)


def _nested(batch: Batch, routes: Any) -> Iterator[Sample]:
    """Rows of a jagged tensor."""
    starts, owner = routes.offsets().tolist(), Borrowed(routes, batch.room)
    ids_TLK = _on_host(routes.values())
    prompts = field(batch.content, "prompts")
    prompt_starts = starts if prompts is None else prompts.offsets().tolist()
    for row in range(len(starts) - 1):
        rows = slice(starts[row], starts[row + 1])
        prompt = 0 if prompts is None else prompt_starts[row + 1] - prompt_starts[row]

        def take(held: Any, rows: slice = rows) -> Array:
            taken: Array = _array(held.values())[rows]
            return taken

        def read(ids: Array, prompt: int = prompt) -> Iterable[Record | Dropped]:
            tokens = {"input_ids": [_zeros(len(ids))], "prompts": [_zeros(prompt)]}
            return verl.records_of_batch({verl.KEY: [ids], **tokens})

        yield Sample(owner, ids_TLK[rows].nbytes, take, read, fingerprint(ids_TLK[rows]))


def _slime(batch: Batch) -> Iterator[Sample]:
    # Not the batch, which would keep its content alive.
    options = batch.options
    for sample in slime.samples_of(batch.content):
        ids, tokens = field(sample, slime.KEY), field(sample, "tokens")
        if ids is None or tokens is None:
            continue
        light = {
            "tokens": _zeros(len(tokens)),
            "response_length": field(sample, "response_length"),
            "metadata": field(sample, "metadata"),
        }

        def read(ids: Array, light: Mapping[str, Any] = light) -> Iterable[Record | Dropped]:
            return slime.records_of_samples([{slime.KEY: ids, **light}], options=options)

        yield batch.array(ids, read)


def _nemo_rl(batch: Batch) -> Iterator[Sample]:
    content = batch.content
    if isinstance(content, list) or field(content, nemo_rl.KEY) is None:
        logs = content if isinstance(content, list) else field(content, "message_log") or []
        for log in logs:
            messages = log if isinstance(log, list) else field(log, "message_log")
            yield batch.whole(messages, lambda held: nemo_rl.records_of_batch({"message_log": [held]}))
        return
    lengths = first_field(content, "input_lengths", "unpadded_sequence_lengths")
    if lengths is None:
        raise InputError("its rows are padded and their lengths (input_lengths) are missing")
    fields = {"input_lengths": lengths, "generation_lengths": field(content, "generation_lengths")}
    width = int(_field(content, nemo_rl.KEY).shape[1])
    yield from batch.rows(
        nemo_rl.KEY,
        fields,
        nemo_rl.records_of_batch,
        lambda row: np.arange(width) >= row["input_lengths"],
        field(content, "task_name"),
    )


def _skyrl(batch: Batch) -> Iterator[Sample]:
    content = batch.content
    if isinstance(_field(content, skyrl.KEY), list | tuple):
        yield from _listed(batch, skyrl.KEY, ("prompt_token_ids", "response_ids"), skyrl.records_of_batch)
        return
    names = ("router_padding_mask", "attention_mask", "response_mask")
    fields = {name: field(content, name) for name in names}
    if fields["router_padding_mask"] is None:
        raise InputError("its rows are padded with ids, and router_padding_mask, which tells them, is missing")
    yield from batch.rows(skyrl.KEY, fields, skyrl.records_of_batch, lambda row: row["router_padding_mask"] != 0)


def _trl(batch: Batch) -> Iterator[Sample]:
    yield from _listed(batch, trl.KEY, ("prompt_ids", "completion_ids"), trl.records_of_rollout)


def _listed(batch: Batch, key: str, names: tuple[str, str], read: Read) -> Iterator[Sample]:
    """Samples of lists: routes, and token ids of prompts and of responses."""
    routes, lists = _field(batch.content, key), [_field(batch.content, name) for name in names]
    for ids, *tokens in zip(routes, *lists, strict=True):
        if ids is None:
            continue
        zeros = [_zeros(len(each)) for each in tokens]

        def read_one(ids: Array, zeros: list[Array] = zeros) -> Iterable[Record | Dropped]:
            return read({key: [ids], **{name: [each] for name, each in zip(names, zeros, strict=True)}})

        yield batch.array(ids, read_one)


def _roll(batch: Batch) -> Iterator[Sample]:
    content = batch.content
    tensors = content.batch if hasattr(content, "non_tensor_batch") else content
    fields = {name: field(tensors, name) for name in ("attention_mask", "response_mask")}
    if fields["attention_mask"] is None:
        raise InputError("its rows are padded, and attention_mask, which gives their lengths, is missing")
    labels = field(getattr(content, "non_tensor_batch", None) or {}, "domain")
    batch = Batch(tensors, batch.room, batch.options)
    yield from batch.rows(roll.KEY, fields, roll.records_of_batch, lambda row: row["attention_mask"] == 0, labels)


def _ms_swift(batch: Batch) -> Iterator[Sample]:
    for sample in batch.content:
        ids = field(sample, ms_swift.KEY)
        if ids is None:
            continue
        encoded = {"length": field(field(sample, "encoded") or {}, "length")}

        def read(ids: Array, encoded: Mapping[str, Any] = encoded) -> Iterable[Record | Dropped]:
            return ms_swift.records_of_samples([{ms_swift.KEY: ids, "encoded": encoded}])

        yield batch.array(ids, read)


def _vllm(batch: Batch) -> Iterator[Sample]:
    # Not the batch, which would keep its content alive.
    options = batch.options
    outputs = batch.content if isinstance(batch.content, list | tuple) else [batch.content]
    for output in outputs:
        if isinstance(output, Mapping) or field(output, vllm.PROMPT_ROUTES) is not None:
            yield batch.whole(output, lambda held: vllm.records_of_outputs([held], options))
            continue
        prompt = _zeros(len(field(output, "prompt_token_ids") or ()))
        for completion in field(output, "outputs"):
            ids = field(completion, vllm.ROUTES)
            if ids is None:
                continue
            tokens = _zeros(len(field(completion, "token_ids")))

            def read(ids: Array, prompt: Array = prompt, tokens: Array = tokens) -> Iterable[Record | Dropped]:
                completion = {"token_ids": tokens, vllm.ROUTES: ids}
                return vllm.records_of_outputs([{"prompt_token_ids": prompt, "outputs": [completion]}], options)

            yield batch.array(ids, read)


def _sglang(batch: Batch) -> Iterator[Sample]:
    # Not the batch, which would keep its content alive.
    options = batch.options
    responses = [batch.content] if isinstance(batch.content, Mapping) else batch.content
    for response in responses:
        yield batch.whole(response, lambda held: sglang.records_of_responses([held], options))


@dataclass(frozen=True)
class Framework:
    """What the observer knows of a framework.

    Attributes:
        split: from a batch to its samples.
        figure: the name of a figure in its logs, "{}" for ours.
        seconds: the same of a time.
    """

    split: Callable[[Batch], Iterator[Sample]]
    figure: str = "moe/{}"
    seconds: str = "moe/{}_s"

    def name_of(self, figure: str) -> str:
        """The name of a figure in the framework's logs; times end in "_s" here."""
        if figure.endswith("_s"):
            return self.seconds.format(figure.removesuffix("_s"))
        return self.figure.format(figure)

    def samples(self, content: Any, room: Room, options: ImportOptions) -> list[Sample]:
        """The samples of a batch.

        Raises:
            InputError: if it is no batch of this framework, or has no routes.
        """
        with damaged_values():
            samples = list(self.split(Batch(content, room, options)))
        if not samples:
            raise InputError("no sample of the batch has routes; was recording turned on?")
        return samples


FRAMEWORKS = {
    "verl": Framework(_verl, "rollout/moe/{}", "timing_s/moe_{}"),
    "slime": Framework(_slime, "rollout/moe/{}", "perf/moe_{}_time"),
    "miles": Framework(_slime, "rollout/moe/{}", "perf/moe_{}_time"),
    "nemo-rl": Framework(_nemo_rl, "moe/{}", "timing/moe_{}"),
    "skyrl": Framework(_skyrl, "generate/moe/{}", "timing/moe_{}"),
    "roll": Framework(_roll, "moe/{}", "time/moe_{}"),
    "ms-swift": Framework(_ms_swift),
    "trl": Framework(_trl),
    "vllm": Framework(_vllm),
    "sglang": Framework(_sglang),
}
