"""Hugging Face transformers: record and replay the routing of a model, and run its experts in a `Session`."""

from trimtab.integrations.transformers.distributed_experts import distribute_experts
from trimtab.integrations.transformers.families import SUPPORTED_MODEL_TYPES, moe_blocks, num_experts
from trimtab.integrations.transformers.recording import RoutingRecord, record_routing
from trimtab.integrations.transformers.replaying import replay_routing

__all__ = [
    "SUPPORTED_MODEL_TYPES",
    "RoutingRecord",
    "distribute_experts",
    "moe_blocks",
    "num_experts",
    "record_routing",
    "replay_routing",
]
