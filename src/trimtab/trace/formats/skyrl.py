"""SkyRL in memory: `rollout_expert_indices` of a `GeneratorOutput` or of a `TrainingInputBatch`.

Read in NovaSky-AI/SkyRL of 2026-08-21. `skyrl/train/generators/base.py`: one array `[t, layers, top_k]` a trajectory,
rows for a prefix of prompt and response. `skyrl/train/dataset/preprocess.py`: a batch `[B, T, layers, top_k]`, padded
on the left; tokens without a route hold 0, 1, ..., top_k - 1 and are those of `router_padding_mask`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from trimtab.errors import InputError
from trimtab.trace.formats.dump_fields import damaged_values, field, integers, optional_integers, rows_of
from trimtab.trace.formats.records import Dropped, Record

KEY = "rollout_expert_indices"
WITHOUT_ROUTES = Dropped("trajectories without routes")
_HOW = (
    "SkyRL records it with generator.inference_engine.enable_return_routed_experts=true and "
    "trainer.policy.megatron_config.moe_enable_routing_replay=true"
)


def records_of_batch(batch: Any) -> Iterator[Record | Dropped]:
    """The records of a `GeneratorOutput` or a `TrainingInputBatch`, or of dictionaries with the same fields.

    Reads `rollout_expert_indices` and, of a list, `prompt_token_ids` and `response_ids`; of a batch,
    `router_padding_mask` and, if present, `attention_mask` and `response_mask`.

    Raises:
        InputError: one line, if there are no routes or no lengths, or shapes do not fit together.
    """
    with damaged_values():
        routes = field(batch, KEY)
        if routes is None:
            raise InputError(f"no {KEY!r} in this batch; {_HOW}")
        yield from _trajectories(batch, routes) if isinstance(routes, list | tuple) else _rows(batch, routes)


def _trajectories(batch: Any, routes: Any) -> Iterator[Record | Dropped]:
    prompts, responses = (rows_of(field(batch, name), name) for name in ("prompt_token_ids", "response_ids"))
    if not len(prompts) == len(responses) == len(routes):
        raise InputError(f"{len(prompts)} prompts and {len(responses)} responses; {KEY} has {len(routes)} entries")
    for row, (ids, prompt, response) in enumerate(zip(routes, prompts, responses, strict=True)):
        if ids is None:
            yield WITHOUT_ROUTES
            continue
        yield Record(
            ids=integers(ids, KEY, 3),
            where=f"trajectory {row}",
            num_tokens=len(prompt) + len(response),
            prompt_length=len(prompt),
            token_ids=np.array([*prompt, *response], np.int64),
        )


def _rows(batch: Any, routes: Any) -> Iterator[Record | Dropped]:
    ids_BTLK = integers(routes, KEY, 4)
    count, width = ids_BTLK.shape[:2]
    masks = {name: optional_integers(batch, name, 2) for name in ("router_padding_mask", "attention_mask")}
    for name, mask in masks.items():
        if mask is not None and mask.shape != (count, width):
            raise InputError(f"{name} has shape {list(mask.shape)}; {KEY} has [{count}, {width}, ...]")
    without_BT, fed_BT = masks.values()
    if without_BT is None:
        raise InputError("its rows are padded with ids, and router_padding_mask, which tells them, is missing")
    responses_BR = optional_integers(batch, "response_mask", 2)
    for row in range(count):
        places = np.flatnonzero(without_BT[row] == 0)
        if not len(places):
            # Filler of data-parallel ranks has the first row's masks.
            yield Dropped("empty sequences")
            yield Dropped("padding rows", width)
            continue
        start, end = int(places[0]), int(places[-1]) + 1
        fed = width - start if fed_BT is None else int((fed_BT[row] != 0).sum())
        answer = 0 if responses_BR is None else int((responses_BR[row] != 0).sum())
        yield Record(
            ids=ids_BTLK[row, start:end],
            where=f"row {row}",
            num_tokens=max(fed, end - start + 1),
            prompt_length=max(0, fed - answer) if answer else 0,
        )
        yield Dropped("padding rows", width - fed)
