"""ms-swift in memory: `OnPolicySample`s of Megatron GRPO with `routed_experts`, `[n, layers, top_k]`, or one row less.

Read in modelscope/ms-swift 4.6.0: `swift/rl_core/data.py`, and `build_routed_experts_batch` in
`swift/megatron/trainers/rlhf_trainers/utils.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from trimtab.trace.formats.dump_fields import damaged_values, field, integers, whole_number
from trimtab.trace.formats.records import Dropped, Record, require_records

KEY = "routed_experts"
WITHOUT_ROUTES = Dropped("samples without routes")


def records_of_samples(samples: Iterable[Any]) -> Iterator[Record | Dropped]:
    """The records of `OnPolicySample`s, or of dictionaries with the same fields.

    Reads `routed_experts` and, once samples are encoded, `encoded["length"]`.

    Raises:
        InputError: one line, if no sample has routes, or one has them in another shape.
    """
    with damaged_values():
        yield from require_records(
            _records(samples), f"no sample has {KEY!r}; ms-swift records it with --router_replay_mode R3"
        )


def _records(samples: Iterable[Any]) -> Iterator[Record | Dropped]:
    for row, sample in enumerate(samples):
        ids = field(sample, KEY)
        if ids is None:
            yield WITHOUT_ROUTES
            continue
        ids_TLK = integers(ids, KEY, 3)
        length = whole_number(field(field(sample, "encoded") or {}, "length"))
        yield Record(ids=ids_TLK, where=f"sample {row}", missing=0, num_tokens=length or None)
