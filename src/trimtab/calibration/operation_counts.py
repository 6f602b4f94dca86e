"""Floating-point operations and memory traffic of a training step's operations, as `OperationCosts` counts them."""

from __future__ import annotations

from trimtab.cluster import ModelSpec
from trimtab.cluster.operations import LOGIT_BYTES, ROW_PASSES, TOKEN_PASSES


def token_flops(model: ModelSpec) -> float:
    """Operations per token in the dense parts of an MoE layer, without attention scores."""
    return 2 * (model.moe_attention.parameters + model.shared_parameters + model.router_parameters)


def token_bytes(model: ModelSpec) -> float:
    """Bytes read and written per token in the dense parts of an MoE layer."""
    return TOKEN_PASSES * model.hidden_size * model.weight_bytes


def square_flops(model: ModelSpec) -> float:
    """Operations of attention in one layer, per pair of tokens: a sequence of t tokens has t * t.

    Layers of limited attention count in full: transformers computes all pairs and masks them.
    """
    return model.moe_attention.square_width + model.moe_attention.reach_width


def head_flops(model: ModelSpec) -> float:
    """Operations per token in the output head."""
    return 2 * model.hidden_size * model.vocab_size


def head_bytes(model: ModelSpec) -> float:
    """Bytes read and written per token in head and loss."""
    return LOGIT_BYTES * model.vocab_size


def row_flops(model: ModelSpec) -> float:
    """Operations per row in one expert."""
    return 2 * model.expert_parameters


def row_bytes(model: ModelSpec) -> float:
    """Bytes read and written per row outside the matrix products."""
    return ROW_PASSES * (model.row_width + model.expert_width) * model.weight_bytes
