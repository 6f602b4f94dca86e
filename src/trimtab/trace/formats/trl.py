"""TRL in memory: what a `rollout_func` of `GRPOTrainer` returns, with `routed_experts` of its own vLLM or SGLang.

Read in trl 1.16.0, `trl/trainer/grpo_trainer.py`: the required keys are `prompt_ids`, `completion_ids` and `logprobs`,
lists of lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from trimtab.errors import InputError
from trimtab.trace.formats.dump_fields import damaged_values, field, integers, rows_of
from trimtab.trace.formats.records import Dropped, Record
from trimtab.trace.formats.routes import missing_id

KEY = "routed_experts"
WITHOUT_ROUTES = Dropped("completions without routes")


def records_of_rollout(rollout: Any) -> Iterator[Record | Dropped]:
    """The records of a dictionary with `prompt_ids`, `completion_ids` and `routed_experts`, an entry each a completion.

    Raises:
        InputError: one line, if there are no routes, or numbers of entries or shapes do not fit together.
    """
    with damaged_values():
        routes = field(rollout, KEY)
        if routes is None:
            raise InputError(f"no {KEY!r} in this rollout; TRL records none: let rollout_func return it")
        prompts, completions = (rows_of(field(rollout, name), name) for name in ("prompt_ids", "completion_ids"))
        if not len(prompts) == len(completions) == len(routes):
            raise InputError(
                f"{len(prompts)} prompt_ids and {len(completions)} completion_ids; {KEY} has {len(routes)} entries"
            )
        for row, (ids, prompt, completion) in enumerate(zip(routes, prompts, completions, strict=True)):
            if ids is None:
                yield WITHOUT_ROUTES
                continue
            ids_TLK = integers(ids, KEY, 3)
            yield Record(
                ids=ids_TLK,
                where=f"completion {row}",
                missing=missing_id(ids_TLK),
                num_tokens=len(prompt) + len(completion),
                prompt_length=len(prompt),
                token_ids=np.array([*prompt, *completion], np.int64),
            )
