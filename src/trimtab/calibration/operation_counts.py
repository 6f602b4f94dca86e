"""Floating-point operations and memory traffic of a training step's operations, as `OperationCosts` counts them."""

from __future__ import annotations

from trimtab.cluster import ModelSpec
from trimtab.cluster.operations import LOGIT_BYTES, ROW_PASSES, TOKEN_PASSES


def token_flops(model: ModelSpec) -> float:
    """Operations per token in the dense parts of an MoE layer, without attention scores."""
    hidden = model.hidden_size
    projections = model.attention_parameters or 4 * hidden**2
    return 2 * projections + 6 * hidden * model.shared_width + 2 * hidden * model.num_experts


def token_bytes(model: ModelSpec) -> float:
    """Bytes read and written per token in the dense parts of an MoE layer."""
    return TOKEN_PASSES * model.hidden_size * model.weight_bytes


def square_flops(model: ModelSpec) -> float:
    """Operations of attention in one layer, per pair of tokens: a sequence of t tokens has t * t."""
    return model.attention_width or 2 * model.hidden_size


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
    return ROW_PASSES * (model.hidden_size + model.expert_width) * model.weight_bytes
