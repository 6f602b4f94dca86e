"""ROLL in memory: a `DataProto` with `routed_experts`, `[B, sequence_length, layers, top_k]`, zeros without a record.

Read in alibaba/ROLL 0.3.0, `roll/utils/functionals.py`: `postprocess_generate` moves prompts to the left, so every
sequence begins at the first column and padding is on the right. `prompts` and `responses` of the same batch keep their
own padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trimtab.errors import InputError
from trimtab.trace.formats.dump_fields import (
    damaged_values,
    field,
    integers,
    label_of,
    optional_integers,
    whole_number,
)
from trimtab.trace.formats.records import Dropped, Record

KEY = "routed_experts"


def records_of_batch(batch: Any) -> Iterator[Record | Dropped]:
    """The records of a `DataProto`, or of a dictionary of its tensors.

    Reads `routed_experts`, `attention_mask` and, if present, `response_mask`, the label `domain` and
    `meta_info["global_step"]`.

    Raises:
        InputError: one line, if there are no routes or no `attention_mask`, or shapes do not fit together.
    """
    with damaged_values():
        tensors = batch.batch if hasattr(batch, "non_tensor_batch") else batch
        routes = field(tensors, KEY)
        if routes is None:
            raise InputError(
                f"no {KEY!r} in this batch; ROLL records it with router_replay.mode: R3 of actor_train and actor_infer"
            )
        ids_BTLK = integers(routes, KEY, 4)
        count, width = ids_BTLK.shape[:2]
        masks = [optional_integers(tensors, name, 2) for name in ("attention_mask", "response_mask")]
        for name, mask in zip(("attention_mask", "response_mask"), masks, strict=True):
            if mask is not None and mask.shape != (count, width):
                raise InputError(f"{name} has shape {list(mask.shape)}; {KEY} has [{count}, {width}, ...]")
        fed_BT, response_BT = masks
        if fed_BT is None:
            raise InputError("its rows are padded, and attention_mask, which gives their lengths, is missing")
        labels = getattr(batch, "non_tensor_batch", None)
        step = whole_number(field(getattr(batch, "meta_info", None) or {}, "global_step"))
        for row in range(count):
            length = int((fed_BT[row] != 0).sum())
            yield Dropped("padding rows", width - length)
            if not length:
                yield Dropped("empty sequences")
                continue
            generated = 0 if response_BT is None else int((response_BT[row] != 0).sum())
            yield Record(
                ids=ids_BTLK[row, :length],
                where=f"row {row}",
                missing=0,
                num_tokens=length,
                prompt_length=length - generated if generated else 0,
                step=step,
                domain="" if labels is None else label_of(field(labels, "domain"), row),
            )
