"""Routing of objects that a framework returned in memory. The framework need not be installed.

All functions raise InputError, naming the place, if a record is not of this model or has a bad id.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trimtab.trace.formats import nemo_rl, sglang, slime, verl, vllm
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
