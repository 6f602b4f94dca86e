"""ROLL, SkyRL, TRL and ms-swift, whose routes are read in memory only.

* ROLL 0.3.0 (`roll/utils/functionals.py`): a `DataProto` with `routed_experts`, `[B, sequence_length, layers, top_k]`,
  zeros without a record. `postprocess_generate` moves prompts to the left, so every sequence begins at the first column
  and padding is on the right. `prompts` and `responses` of the same batch keep their own padding.
* SkyRL of 2026-08-21: `rollout_expert_indices` of a `GeneratorOutput` (`skyrl/train/generators/base.py`), one array
  `[t, layers, top_k]` a trajectory, rows for a prefix of prompt and response; or of a `TrainingInputBatch`
  (`skyrl/train/dataset/preprocess.py`), `[B, T, layers, top_k]`, padded on the left. There tokens without a route hold
  0, 1, ..., top_k - 1 and are those of `router_padding_mask`.
* TRL 1.16.0 (`trl/trainer/grpo_trainer.py`): what a `rollout_func` of `GRPOTrainer` returns, with `routed_experts` of
  its own vLLM or SGLang. The required keys are `prompt_ids`, `completion_ids` and `logprobs`, lists of lists.
* ms-swift 4.6.0 (`swift/rl_core/data.py`, and `build_routed_experts_batch` in
  `swift/megatron/trainers/rlhf_trainers/utils.py`): `OnPolicySample`s of Megatron GRPO with `routed_experts`,
  `[n, layers, top_k]`, or one row less.

All raise InputError, in one line, if there are no routes or no lengths, or shapes do not fit together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.formats import dump_fields as fields
from trimtab.trace.formats.dump_fields import field
from trimtab.trace.formats.records import Dropped, Record, require_records

KEY, SKYRL_KEY = "routed_experts", "rollout_expert_indices"
_SKYRL_HOW = (
    "SkyRL records it with generator.inference_engine.enable_return_routed_experts=true and "
    "trainer.policy.megatron_config.moe_enable_routing_replay=true"
)


def roll_records(batch: Any) -> Iterator[Record | Dropped]:
    """The records of a ROLL `DataProto`, or of a dictionary of its tensors.

    Reads `routed_experts`, `attention_mask` and, if present, `response_mask`, the label `domain` and
    `meta_info["global_step"]`.
    """
    tensors = batch.batch if hasattr(batch, "non_tensor_batch") else batch
    routes = fields.required(tensors, KEY, "ROLL records it with router_replay.mode: R3 of actor_train and actor_infer")
    shape = fields.shape_of(routes, KEY)
    fed_BT, response_BT = fields.masks(tensors, KEY, shape, "attention_mask", "response_mask")
    if fed_BT is None:
        raise InputError("its rows are padded, and attention_mask, which gives their lengths, is missing")
    labels = field(getattr(batch, "non_tensor_batch", None) or {}, "domain")
    step = fields.whole_number(field(getattr(batch, "meta_info", None) or {}, "global_step"))
    for row, (_, _, length) in enumerate(fields.spans(fed_BT)):
        if not length:
            yield from (Dropped("empty sequences"), Dropped("padding rows", shape[1]))
            continue
        generated = 0 if response_BT is None else int((response_BT[row] != 0).sum())
        yield Record(
            routes,
            f"row {row}",
            read=partial(_without_surplus, row=row, length=length),
            place=row,
            rows=slice(0, length),
            num_tokens=length,
            prompt_length=length - generated if generated else 0,
            step=step,
            domain=fields.label_of(labels, row),
        )


def _without_surplus(routes: Any, row: int, length: int) -> Array:
    """The array of a ROLL batch. Raises InputError if the row holds routes behind its tokens.

    When ROLL 0.3.0 resumes an aborted generation, it appends the routes of all tokens to those of the first part
    (`roll/distributed/scheduler/user_defined_rollout_loop.py:149` at 8eb27cc2).
    """
    ids = fields.as_array(routes, KEY)
    if surplus := int((ids[row, length:] != ids[row, length:, :1, :1]).any(axis=(1, 2)).sum()):
        raise InputError(
            f"{surplus} rows of {KEY} behind those of its {length} tokens: ROLL appends routes again when it resumes "
            "an aborted generation, so rows are of other tokens"
        )
    return ids


def skyrl_records(batch: Any) -> Iterator[Record | Dropped]:
    """The records of a SkyRL `GeneratorOutput` or `TrainingInputBatch`, or of dictionaries with the same fields.

    Reads `rollout_expert_indices` and, of a list, `prompt_token_ids` and `response_ids`; of a batch,
    `router_padding_mask` and, if present, `attention_mask` and `response_mask`.
    """
    routes = fields.required(batch, SKYRL_KEY, _SKYRL_HOW)
    if isinstance(routes, list | tuple):
        yield from _listed(batch, SKYRL_KEY, ("prompt_token_ids", "response_ids"), "trajectory")
        return
    _, width, *_ = shape = fields.shape_of(routes, SKYRL_KEY)
    without_BT, fed_BT = fields.masks(batch, SKYRL_KEY, shape, "router_padding_mask", "attention_mask")
    if without_BT is None:
        raise InputError("its rows are padded with ids, and router_padding_mask, which tells them, is missing")
    responses_BR = fields.optional_integers(batch, "response_mask", 2)
    for row, (start, end, count) in enumerate(fields.spans(without_BT == 0)):
        if not count:
            # Filler of data-parallel ranks has the first row's masks.
            yield from (Dropped("empty sequences"), Dropped("padding rows", width))
            continue
        fed = width - start if fed_BT is None else int((fed_BT[row] != 0).sum())
        answer = 0 if responses_BR is None else int((responses_BR[row] != 0).sum())
        yield Record(
            routes,
            f"row {row}",
            place=row,
            rows=slice(start, end),
            padding=width - fed,
            num_tokens=max(fed, end - start + 1),
            prompt_length=max(0, fed - answer) if answer else 0,
        )


def trl_records(rollout: Any) -> Iterator[Record | Dropped]:
    """The records of what a `rollout_func` of TRL returns.

    Reads `routed_experts`, `prompt_ids` and `completion_ids`, an entry each a completion.
    """
    fields.required(rollout, KEY, "TRL records none: let rollout_func return it")
    yield from _listed(rollout, KEY, ("prompt_ids", "completion_ids"), "completion")


def ms_swift_records(samples: Iterable[Any]) -> Iterator[Record | Dropped]:
    """The records of ms-swift's `OnPolicySample`s, or of dictionaries with the same fields.

    Reads `routed_experts` and, once samples are encoded, `encoded["length"]`.
    """

    def records() -> Iterator[Record | Dropped]:
        for row, sample in enumerate(samples):
            length = fields.whole_number(field(field(sample, "encoded") or {}, "length"))
            ids = field(sample, KEY)
            if ids is None:
                yield Dropped("samples without routes")
            else:
                yield Record(ids, f"sample {row}", placed=False, num_tokens=length or None)

    yield from require_records(records(), f"no sample has {KEY!r}; ms-swift records it with --router_replay_mode R3")


def _listed(batch: Any, key: str, names: tuple[str, str], what: str) -> Iterator[Record | Dropped]:
    """Records of lists: routes, None for sequences without, and token ids of prompts and of responses."""
    routes = field(batch, key)
    prompts, responses = (fields.rows_of(field(batch, name), name) for name in names)
    if not len(prompts) == len(responses) == len(routes):
        raise InputError(f"{len(prompts)} {names[0]} and {len(responses)} {names[1]}; {key} has {len(routes)} entries")
    for row, (ids, *tokens) in enumerate(zip(routes, prompts, responses, strict=True)):
        if ids is None:
            yield Dropped(f"{what[:-1]}ies without routes" if what.endswith("y") else f"{what}s without routes")
        else:
            yield Record(
                ids,
                f"{what} {row}",
                placed=key == SKYRL_KEY,
                num_tokens=sum(map(len, tokens)),
                prompt_length=len(tokens[0]),
                tokens=tuple(tokens),
            )
