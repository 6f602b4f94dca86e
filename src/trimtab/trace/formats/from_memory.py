"""Routing of objects that a framework returned in memory. The framework need not be installed.

All functions raise InputError, naming the place, if a record is not of this model or has a bad id.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trimtab.trace.formats import ms_swift, nemo_rl, roll, sglang, skyrl, slime, trl, verl, vllm
from trimtab.trace.formats.importing import trace_of
from trimtab.trace.formats.records import ImportOptions
from trimtab.trace.routing import RoutingTrace


def from_vllm(outputs: Iterable[Any], options: ImportOptions) -> RoutingTrace:
    """Routing of vLLM's `RequestOutput`s, or of its responses as dicts."""
    return trace_of(vllm.records_of_outputs(outputs, options), options)


def from_sglang(responses: Iterable[Any], options: ImportOptions) -> RoutingTrace:
    """Routing of SGLang's responses, dicts with `meta_info`."""
    return trace_of(sglang.records_of_responses(responses, options), options)


def from_verl(batch: Any, options: ImportOptions) -> RoutingTrace:
    """Routing of a verl `DataProto`, or of a dict of its tensors or arrays, with `routed_experts`."""
    return trace_of(verl.records_of_batch(batch), options)


def from_slime(samples: Iterable[Any], options: ImportOptions) -> RoutingTrace:
    """Routing of slime's (or miles') `Sample`s, or of dicts of the same fields, with `rollout_routed_experts`."""
    return trace_of(slime.records_of_samples(samples, options=options), options)


def from_nemo_rl(batch: Any, options: ImportOptions) -> RoutingTrace:
    """Routing of a NeMo-RL batch, a dict of tensors or arrays with `routed_experts`."""
    return trace_of(nemo_rl.records_of_batch(batch), options)


def from_skyrl(batch: Any, options: ImportOptions) -> RoutingTrace:
    """Routing of SkyRL's `GeneratorOutput` or `TrainingInputBatch`, with `rollout_expert_indices`."""
    return trace_of(skyrl.records_of_batch(batch), options)


def from_roll(batch: Any, options: ImportOptions) -> RoutingTrace:
    """Routing of a ROLL `DataProto`, or of a dict of its tensors, with `routed_experts` and `attention_mask`."""
    return trace_of(roll.records_of_batch(batch), options)


def from_ms_swift(samples: Iterable[Any], options: ImportOptions) -> RoutingTrace:
    """Routing of ms-swift's `OnPolicySample`s, or of dicts of the same fields, with `routed_experts`."""
    return trace_of(ms_swift.records_of_samples(samples), options)


def from_trl(rollout: Any, options: ImportOptions) -> RoutingTrace:
    """Routing of what a `rollout_func` of TRL returns: `prompt_ids`, `completion_ids` and `routed_experts`."""
    return trace_of(trl.records_of_rollout(rollout), options)
