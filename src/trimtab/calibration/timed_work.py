"""How much work is in an operation, in the terms that `OperationCosts` turns into seconds."""

from __future__ import annotations

from trimtab.cluster import ModelSpec
from trimtab.cluster.operations import LOGIT_BYTES, ROW_PASSES, TOKEN_PASSES


def token_flops(model: ModelSpec) -> float:
    """Of a token in the dense half of a MoE layer, attention itself aside."""
    hidden = model.hidden_size
    projections = model.attention_parameters or 4 * hidden**2
    return 2 * projections + 6 * hidden * model.shared_width + 2 * hidden * model.num_experts


def token_bytes(model: ModelSpec) -> float:
    """Memory traffic of a token in the dense half of a MoE layer."""
    return TOKEN_PASSES * model.hidden_size * model.weight_bytes


def square_flops(model: ModelSpec) -> float:
    """Of attention over a sequence of t tokens in one layer, for each of t * t."""
    return model.attention_width or 2 * model.hidden_size


def head_flops(model: ModelSpec) -> float:
    """Of a token in the output head."""
    return 2 * model.hidden_size * model.vocab_size


def head_bytes(model: ModelSpec) -> float:
    """Memory traffic of a token in head and loss."""
    return LOGIT_BYTES * model.vocab_size


def row_flops(model: ModelSpec) -> float:
    """Of a row through one expert."""
    return 2 * model.expert_parameters


def row_bytes(model: ModelSpec) -> float:
    """Memory traffic of a row beside the matrix products."""
    return ROW_PASSES * (model.hidden_size + model.expert_width) * model.weight_bytes
