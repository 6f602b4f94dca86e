"""Memory of a rank under a plan: parameters, replicas and activations."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ModelSpec
from trimtab.cluster.cost import GRADIENT_BYTES, STATE_BYTES
from trimtab.planner import StepPlan
from trimtab.policies.policy import Traits

# Values kept for backward: of a token in a layer's dense parts, in token widths; of a row, in token and expert widths.
TOKEN_WIDTHS = 8
ROW_WIDTHS = 2
ROW_EXPERT_WIDTHS = 3


def memory_bytes(
    plan: StepPlan,
    loads_MLR: Array,
    tokens_MR: Array,
    model: ModelSpec,
    traits: Traits,
    *,
    ring_layers: int,
    ranks: int,
) -> dict[str, int]:
    """Bytes of the rank that needs most, by purpose.

    Activations are those of one micro-step without checkpointing. Optimizer state of dense parameters is sharded.

    Args:
        loads_MLR: `[M, L, R]` rows that each rank computes.
        tokens_MR: `[M, R]` tokens of each rank.
        ring_layers: layers with replicas in shared slots at the same time.
        ranks: data ranks of all expert-parallel groups.
    """
    per_parameter = model.weight_bytes + GRADIENT_BYTES
    layers = plan.num_layers
    homes_LR = np.stack([np.bincount(home, minlength=plan.num_ranks) for home in plan.home])
    dense = model.dense_parameters * layers // model.moe_layers
    rows_MR = loads_MLR.sum(axis=1)
    kept_MR = layers * TOKEN_WIDTHS * model.hidden_size * tokens_MR
    kept_MR = kept_MR + rows_MR * (ROW_WIDTHS * model.hidden_size + ROW_EXPERT_WIDTHS * model.expert_width)
    return {
        "experts": int(homes_LR.sum(axis=0).max()) * model.expert_parameters * (per_parameter + STATE_BYTES),
        "dense parts": dense * per_parameter + dense * STATE_BYTES // ranks,
        "replica pool": replica_pool_bytes(plan, model, traits, ring_layers),
        "activations": int(kept_MR.max()) * model.weight_bytes,
    }


def replica_pool_bytes(plan: StepPlan, model: ModelSpec, traits: Traits, ring_layers: int) -> int:
    """Bytes of a rank for replicas and their gradients, including gradients in transfer."""
    gradient_bytes = GRADIENT_BYTES * model.expert_parameters
    if traits.copies == "none" or not plan.num_replicas:
        return 0
    instance_P = np.repeat(np.arange(len(plan.replica_starts) - 1), np.diff(plan.replica_starts))
    layer_P, rank_P = instance_P % plan.num_layers, plan.replica_ranks.astype(np.int64)
    if traits.copies == "shared slots":
        home_P = plan.home[layer_P, plan.replica_experts].astype(np.int64)
        arriving = int(np.bincount(instance_P * plan.num_ranks + home_P).max())
        return ring_layers * (plan.slots_per_rank * model.expert_bytes + arriving * gradient_bytes)
    if traits.copies == "layer slots":
        copies = np.unique(np.stack([layer_P, plan.replica_experts, rank_P]), axis=1)
        most = int(np.bincount(copies[2]).max())
    else:
        most = int(np.bincount(instance_P // plan.num_layers * plan.num_ranks + rank_P).max())
    return most * (model.expert_bytes + gradient_bytes)
