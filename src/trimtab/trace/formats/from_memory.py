"""Routing of objects that a framework returned in memory. The framework need not be installed.

All functions raise InputError, naming the place, if a record is not of this model or has a bad id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from trimtab.trace.formats import nemo_rl, sglang, slime, training_batches, verl, vllm
from trimtab.trace.formats.importing import trace_of
from trimtab.trace.formats.records import Dropped, ImportOptions, Record
from trimtab.trace.routing import RoutingTrace

READERS: dict[str, Callable[[Any, ImportOptions], Iterator[Record | Dropped]]] = {
    "vllm": vllm.records_of_outputs,
    "sglang": sglang.records_of_responses,
    "verl": lambda batch, options: verl.records_of_batch(batch),
    "slime": lambda samples, options: slime.records_of_samples(samples, options=options),
    "nemo-rl": lambda batch, options: nemo_rl.records_of_batch(batch),
    "skyrl": lambda batch, options: training_batches.skyrl_records(batch),
    "roll": lambda batch, options: training_batches.roll_records(batch),
    "ms-swift": lambda samples, options: training_batches.ms_swift_records(samples),
    "trl": lambda rollout, options: training_batches.trl_records(rollout),
}
"""By framework: from its batch and facts of the model to records, whose ids are not read yet."""


def from_vllm(outputs: Iterable[Any], options: ImportOptions) -> RoutingTrace:
    """Routing of vLLM's `RequestOutput`s, or of its responses as dicts."""
    return trace_of(READERS["vllm"](outputs, options), options)


def from_sglang(responses: Iterable[Any], options: ImportOptions) -> RoutingTrace:
    """Routing of SGLang's responses, dicts with `meta_info`."""
    return trace_of(READERS["sglang"](responses, options), options)


def from_verl(batch: Any, options: ImportOptions) -> RoutingTrace:
    """Routing of a verl `DataProto`, or of a dict of its tensors or arrays, with `routed_experts`."""
    return trace_of(READERS["verl"](batch, options), options)


def from_slime(samples: Iterable[Any], options: ImportOptions) -> RoutingTrace:
    """Routing of slime's (or miles') `Sample`s, or of dicts of the same fields, with `rollout_routed_experts`."""
    return trace_of(READERS["slime"](samples, options), options)


def from_nemo_rl(batch: Any, options: ImportOptions) -> RoutingTrace:
    """Routing of a NeMo-RL batch, a dict of tensors or arrays with `routed_experts`."""
    return trace_of(READERS["nemo-rl"](batch, options), options)


def from_skyrl(batch: Any, options: ImportOptions) -> RoutingTrace:
    """Routing of SkyRL's `GeneratorOutput` or `TrainingInputBatch`, with `rollout_expert_indices`."""
    return trace_of(READERS["skyrl"](batch, options), options)


def from_roll(batch: Any, options: ImportOptions) -> RoutingTrace:
    """Routing of a ROLL `DataProto`, or of a dict of its tensors, with `routed_experts` and `attention_mask`."""
    return trace_of(READERS["roll"](batch, options), options)


def from_ms_swift(samples: Iterable[Any], options: ImportOptions) -> RoutingTrace:
    """Routing of ms-swift's `OnPolicySample`s, or of dicts of the same fields, with `routed_experts`."""
    return trace_of(READERS["ms-swift"](samples, options), options)


def from_trl(rollout: Any, options: ImportOptions) -> RoutingTrace:
    """Routing of what a `rollout_func` of TRL returns: `prompt_ids`, `completion_ids` and `routed_experts`."""
    return trace_of(READERS["trl"](rollout, options), options)
