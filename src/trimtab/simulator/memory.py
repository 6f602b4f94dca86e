"""Memory of a rank under a plan: parameters, gradients, optimizer state, activations, buffers and replicas.

docs/simulator.md lists the formulas and their sources. Not counted: the CUDA context, workspaces of libraries, and
fragmentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ModelSpec
from trimtab.cluster.operations import GRADIENT_BYTES
from trimtab.planner import StepPlan
from trimtab.planner.replicas.paths import HOST
from trimtab.policies.policy import Traits

DDP, ZERO1, FSDP = SHARDINGS = ("ddp", "zero1", "fsdp")
"""Sharding of training state over data ranks: nothing; optimizer state, as Megatron's distributed optimizer does;
parameters, gradients and optimizer state, as FSDP and ZeRO-3 do."""
# A float32 copy of weights that are narrower, which the optimizer updates.
MASTER_BYTES = 4
# Values of a token that a layer keeps for backward, in token widths: inputs and outputs of two norms.
TOKEN_WIDTHS = 4
# Router logits and probabilities of a token, float32 each, for every expert.
ROUTER_BYTES = 8
# Values of a row that an expert keeps: its input and output, in token widths; gate, up and their product, in expert
# widths.
ROW_WIDTHS, FEED_FORWARD_WIDTHS = 2, 3
# Before the loss: input and output of the last norm, in token widths, and one float32 value for every logit.
HEAD_WIDTHS, LOGIT_BYTES = 2, 4
# FSDP gathers the weights of a layer while another one computes.
GATHERED_LAYERS = 2


@dataclass(frozen=True, eq=False)
class RankLoad:
    """What a plan puts on each of R ranks, in the layers of the trace.

    Attributes:
        layers: MoE layers of the trace, L.
        homes_R: `[R]` experts at home, over all layers of the trace.
        tokens_MR: `[M, R]` tokens of each data rank.
        rows_MLR: `[M, L, R]` rows that each rank computes.
        pool_R: `[R]` bytes for replicas and their gradients, of the whole model.
    """

    layers: int
    homes_R: Array
    tokens_MR: Array
    rows_MLR: Array
    pool_R: Array


def rank_memory(
    load: RankLoad,
    model: ModelSpec,
    *,
    groups: int = 1,
    sharding: str = ZERO1,
    checkpointing: bool = False,
    times_ranks: int = 1,
) -> dict[str, int]:
    """Bytes by purpose of the rank that needs most; `gathered layers` only with FSDP.

    Args:
        groups: expert-parallel groups. Experts' state is sharded over them, dense state over all their ranks.
        sharding: one of `SHARDINGS`.
        checkpointing: true: only the input of every layer is kept, and one layer's activations while it runs again.
        times_ranks: so many times the ranks of a group, each with fewer experts and as many tokens as before.
    """
    part = model.moe_layers / load.layers
    ranks = len(load.homes_R) * times_ranks
    experts_R = np.ceil(load.homes_R * part / times_ranks).astype(np.int64)
    expert_R = experts_R * model.expert_parameters
    dense_R = np.full(len(experts_R), model.dense_parameters)
    needs: dict[str, Array] = {}
    for name, parameters_R, shards in (("expert", expert_R, groups), ("dense", dense_R, ranks * groups)):
        for purpose, (size, is_sharded) in _parameter_bytes(model.weight_bytes, sharding).items():
            needs[f"{name} {purpose}"] = -(-parameters_R * size // (shards if is_sharded else 1))
    if sharding == FSDP:
        layer_R = expert_R // model.moe_layers + dense_R // (model.moe_layers + model.dense_layers)
        needs["gathered layers"] = layer_R * (GATHERED_LAYERS * model.weight_bytes + GRADIENT_BYTES)
    needs |= _activations(load, model, part, checkpointing)
    needs["replica pool"] = load.pool_R
    peak = int(np.argmax(sum(needs.values())))
    return {purpose: int(needs_R[peak]) for purpose, needs_R in needs.items()}


def _parameter_bytes(weight_bytes: int, sharding: str) -> dict[str, tuple[int, bool]]:
    """Bytes of a parameter by purpose, and whether ranks share them out."""
    wide, master = max(GRADIENT_BYTES, weight_bytes), MASTER_BYTES if weight_bytes < MASTER_BYTES else 0
    # Adam's.
    moments = 2 * wide
    if sharding == FSDP:
        # The sharded parameters are in float32, so they are the master copy.
        return {"parameters": (wide, True), "gradients": (wide, True), "optimizer state": (moments, True)}
    return {
        "parameters": (weight_bytes, False),
        "gradients": (wide, False),
        "optimizer state": (master + moments, sharding == ZERO1),
    }


def _activations(load: RankLoad, model: ModelSpec, part: float, checkpointing: bool) -> dict[str, Array]:
    """`[R]` bytes in the micro-step in which the rank needs most: activations, output head, dispatch buffers."""
    hidden, wide = model.hidden_size, model.weight_bytes
    kept = TOKEN_WIDTHS * hidden + attention_values(model)
    token = wide * (kept + FEED_FORWARD_WIDTHS * model.shared_width) + ROUTER_BYTES * model.num_experts
    dense_token = wide * (kept + FEED_FORWARD_WIDTHS * model.dense_width)
    row = wide * (ROW_WIDTHS * model.row_width + FEED_FORWARD_WIDTHS * model.expert_width)
    tokens_MR, busiest_MR = load.tokens_MR, load.rows_MLR.max(axis=1)
    if checkpointing:
        inputs_MR = (model.moe_layers + model.dense_layers) * wide * hidden * tokens_MR
        largest_MR = np.maximum(
            token * tokens_MR + row * busiest_MR, bool(model.dense_layers) * dense_token * tokens_MR
        )
        layers_MR = inputs_MR + largest_MR
    else:
        rows_MR = np.ceil(load.rows_MLR.sum(axis=1) * part).astype(np.int64)
        layers_MR = (model.moe_layers * token + model.dense_layers * dense_token) * tokens_MR + row * rows_MR
    head_MR = (wide * HEAD_WIDTHS * hidden + LOGIT_BYTES * model.vocab_size) * tokens_MR
    # Rows sent and rows received, of one layer; combine and backward use the same buffers.
    buffers_MR = wide * model.row_width * (model.top_k * tokens_MR + busiest_MR)
    ranks = np.arange(tokens_MR.shape[1])
    most_R = (layers_MR + head_MR + buffers_MR).argmax(axis=0)
    return {
        "activations": layers_MR[most_R, ranks],
        "output head": head_MR[most_R, ranks],
        "dispatch buffers": buffers_MR[most_R, ranks],
    }


def attention_values(model: ModelSpec) -> int:
    """Values of a token that attention keeps in a layer: queries, keys, values and outputs.

    With grouped queries that is the width of all projections. Latent attention has narrower projections, and expands
    keys and values to all heads.
    """
    widths = model.attention_width or 2 * model.hidden_size
    projected = (model.attention_parameters or 4 * model.hidden_size**2) // model.hidden_size
    return projected if projected >= widths else 2 * widths


def replica_pool_bytes(plan: StepPlan, model: ModelSpec, traits: Traits, ring_layers: int) -> Array:
    """`[R]` int64 bytes of each rank for replicas and their gradients: those that it computes, and those that arrive.

    Args:
        ring_layers: layers with replicas in shared slots at the same time.
    """
    ranks, gradient_bytes = plan.num_ranks, GRADIENT_BYTES * model.expert_parameters
    if traits.copies == "none" or not plan.num_replicas:
        return np.zeros(ranks, np.int64)
    instance_P = np.repeat(np.arange(len(plan.replica_starts) - 1), np.diff(plan.replica_starts))
    layer_P, rank_P = instance_P % plan.num_layers, plan.replica_ranks.astype(np.int64)
    home_P = plan.home[layer_P, plan.replica_experts].astype(np.int64)
    part = model.moe_layers / plan.num_layers
    if traits.copies == "shared slots":
        gradients_IR = np.zeros((len(plan.replica_starts) - 1, ranks), np.int64)
        np.add.at(gradients_IR, (np.tile(instance_P, 2), np.concatenate((home_P, rank_P))), 1)
        slots_bytes = plan.slots_per_rank * model.expert_bytes
        return np.asarray(ring_layers * (slots_bytes + gradients_IR.max(axis=0) * gradient_bytes), np.int64)
    if traits.copies == "layer slots":
        copies = np.unique(np.stack([layer_P, plan.replica_experts, rank_P]), axis=1)
        held_R = np.bincount(copies[2], minlength=ranks)
    else:
        held_MR = np.zeros((plan.num_micro_steps, ranks), np.int64)
        np.add.at(held_MR, (instance_P // plan.num_layers, rank_P), 1)
        held_R = held_MR.max(axis=0)
    return np.ceil(held_R * part).astype(np.int64) * (model.expert_bytes + gradient_bytes)


def mirror_bytes(plan: StepPlan, model: ModelSpec, traits: Traits) -> int:
    """Host memory of the node with the largest mirror of expert weights; 0 without transfers from host memory."""
    if not traits.host_path or not np.any(plan.replica_paths == HOST):
        return 0
    entries = max(len(plan.mirror_entries(node)) for node in range(plan.num_ranks // plan.ranks_per_node))
    return int(np.ceil(entries * model.moe_layers / plan.num_layers)) * model.expert_bytes


def state_bytes(memory: Mapping[str, int], name: str) -> dict[str, int]:
    """Bytes of the `expert` or `dense` parameters, their gradients and their optimizer state, in `rank_memory`."""
    return {purpose.removeprefix(f"{name} "): size for purpose, size in memory.items() if purpose.startswith(name)}
