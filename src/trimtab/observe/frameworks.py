"""How each framework hands over recorded routing: from its batch to `Sample`s, without reading their ids.

Batches are split by the readers of `trace/formats/`, whose records say where ids are. The observer's thread reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trimtab.errors import InputError
from trimtab.observe.borrowed import Borrowed, Room, Sample, fingerprint, size_of
from trimtab.trace import ImportOptions
from trimtab.trace.formats.dump_fields import damaged_values, field, is_on_device
from trimtab.trace.formats.from_memory import READERS
from trimtab.trace.formats.records import Dropped, Record
from trimtab.trace.formats.vllm import PROMPT_ROUTES


@dataclass(frozen=True)
class Framework:
    """What the observer knows of a framework.

    Attributes:
        reader: its name among those of `from_memory`.
        figure: the name of a figure in its logs, "{}" for ours.
        seconds: the same of a time.
        is_text: whether an item of a batch, such as a response, holds its ids as text or lists; it is then read whole.
            None if no batch does.
    """

    reader: str
    figure: str = "moe/{}"
    seconds: str = "moe/{}_s"
    is_text: Callable[[Any], bool] | None = None

    def name_of(self, figure: str) -> str:
        """The name of a figure in the framework's logs; times end in "_s" here."""
        if figure.endswith("_s"):
            return self.seconds.format(figure.removesuffix("_s"))
        return self.figure.format(figure)

    def samples(self, content: Any, room: Room, options: ImportOptions) -> list[Sample]:
        """The samples of a batch. Raises InputError if it is no batch of this framework, or has no routes."""
        with damaged_values():
            samples = list(self._split(content, room, options))
        if not samples:
            raise InputError("no sample of the batch has routes; was recording turned on?")
        return samples

    def _split(self, content: Any, room: Room, options: ImportOptions) -> Iterator[Sample]:
        read = READERS[self.reader]
        if self.is_text is None:
            yield from _of_records(read(content, options), room)
            return
        for item in content if isinstance(content, list | tuple) else [content]:
            if self.is_text(item):
                # Not a partial function of the batch, which would keep its content alive.
                yield Sample(Borrowed(item, room), size_of(item), lambda held: read([held], options))
            else:
                yield from _of_records(read([item], options), room)


def _of_records(records: Iterable[Record | Dropped], room: Room) -> Iterator[Sample]:
    before: Any = None
    for record in records:
        if isinstance(record, Dropped):
            continue
        source = record.source
        if is_on_device(source):
            raise InputError(
                f"the recorded routes are on a {source.device.type} device; hand them over as the rollout left them"
            )
        # Records of a batch have one source, of which a reference is kept until all are made.
        if source is not before:
            before, owner = source, Borrowed(source, room)
        block = record.block if hasattr(source, "dtype") else None
        light = replace(record, source=None, tokens=())
        yield Sample(
            owner,
            size_of(source) if block is None else block.nbytes,
            partial(_read, light),
            None if block is None else fingerprint(block),
        )


def _read(light: Record, source: Any) -> list[Record]:
    return [replace(light, source=source)]


FRAMEWORKS = {
    "verl": Framework("verl", "rollout/moe/{}", "timing_s/moe_{}"),
    "slime": Framework("slime", "rollout/moe/{}", "perf/moe_{}_time"),
    "miles": Framework("slime", "rollout/moe/{}", "perf/moe_{}_time"),
    "nemo-rl": Framework("nemo-rl", "moe/{}", "timing/moe_{}"),
    "skyrl": Framework("skyrl", "generate/moe/{}", "timing/moe_{}"),
    "roll": Framework("roll", "moe/{}", "time/moe_{}"),
    "ms-swift": Framework("ms-swift"),
    "trl": Framework("trl"),
    "vllm": Framework(
        "vllm", is_text=lambda output: isinstance(output, Mapping) or field(output, PROMPT_ROUTES) is not None
    ),
    "sglang": Framework("sglang", is_text=lambda response: True),
}
