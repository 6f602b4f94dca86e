"""Memory of a rank under a plan: parameters, gradients, optimizer state, activations, buffers, replicas. Ways to fit.

docs/simulator.md lists the formulas and their sources. Not counted: the CUDA context, workspaces of libraries, and
fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import Layout, ModelSpec
from trimtab.cluster.operations import GRADIENT_BYTES
from trimtab.cluster.parallel_layout import FSDP, SELECTIVE, SHARDINGS, ZERO1, Checkpointing
from trimtab.planner import StepPlan
from trimtab.planner.replicas.paths import HOST
from trimtab.policies.policy import Traits
from trimtab.simulator.step import StepSettings

# A float32 copy of weights that are narrower, which the optimizer updates.
MASTER_BYTES = 4
# Values of a token that a layer keeps for backward, in token widths: inputs and outputs of two norms.
TOKEN_WIDTHS = 4
# Router logits and probabilities of a token, float32 each, for every expert.
ROUTER_BYTES = 8
# Values of a row that an expert keeps: its input and output, in token widths; gate, up and their product, in expert
# widths.
ROW_WIDTHS, FEED_FORWARD_WIDTHS = 2, 3
# Of these, what selective recomputation computes again: outputs of norms, products of gate and up.
AGAIN_TOKEN_WIDTHS, AGAIN_FEED_FORWARD_WIDTHS = 2, 1
# Before the loss: input and output of the last norm, in token widths, and one float32 value for every logit.
HEAD_WIDTHS, LOGIT_BYTES = 2, 4
# A micro-batch is not searched beyond it.
MOST_TOKENS = 1 << 24
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
        pool_has_layers: whether they are in memory of their own in every layer, so that a stage has a part of them.
    """

    layers: int
    homes_R: Array
    tokens_MR: Array
    rows_MLR: Array
    pool_R: Array
    pool_has_layers: bool = False


def rank_memory(
    load: RankLoad,
    model: ModelSpec,
    *,
    groups: int = 1,
    sharding: str = ZERO1,
    checkpointing: Checkpointing = False,
    layout: Layout | None = None,
    times_ranks: int = 1,
) -> dict[str, int]:
    """Bytes by purpose of the rank that needs most, in any stage of a pipeline; `gathered layers` only with FSDP.

    Args:
        groups: expert-parallel groups. Experts' state is sharded over them, dense state over all their ranks.
        sharding: one of `SHARDINGS`.
        checkpointing: true: only the input of every layer is kept, and one layer's activations while it runs again.
        layout: stages have the mean of their layers; stage s keeps activations of `pp - s` micro-steps.
        times_ranks: so many times the ranks of a group, each with fewer experts and as many tokens as before.
    """
    layout = layout or Layout()
    stages = [_Stage(layout, number, *layers) for number, layers in enumerate(layout.stages(model).T.tolist())]
    needs = [_stage_needs(load, model, stage, groups, sharding, checkpointing, times_ranks) for stage in stages]
    return max(needs, key=lambda each: sum(each.values()))


def largest_micro_batch(
    load: RankLoad,
    model: ModelSpec,
    device_bytes: float,
    *,
    groups: int = 1,
    sharding: str = ZERO1,
    checkpointing: Checkpointing = False,
    layout: Layout | None = None,
) -> tuple[int, int]:
    """Most tokens of a rank in a micro-step that fit a device, and most rows of a rank in a layer then; 0, 0 if none.

    Tokens and rows are in the proportions of the load, so the micro-batch has its imbalance: larger ones usually have
    less.
    """
    tokens, rows = int(load.tokens_MR.max(initial=0)), int(load.rows_MLR.max(initial=0))

    def fits(most: int) -> bool:
        scale = most / max(1, tokens)
        scaled = replace(load, tokens_MR=load.tokens_MR * scale, rows_MLR=load.rows_MLR * scale)
        needs = rank_memory(scaled, model, groups=groups, sharding=sharding, checkpointing=checkpointing, layout=layout)
        return sum(needs.values()) <= device_bytes

    if not tokens or not fits(1):
        return 0, 0
    low, high = 1, 2
    while high <= MOST_TOKENS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, math.ceil(rows * low / tokens)


@dataclass(frozen=True)
class _Stage:
    """A stage of a pipeline: its number, and its layers with experts and without."""

    layout: Layout
    number: int
    moe_layers: int
    dense_layers: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.layout.pp - 1

    @property
    def in_flight(self) -> int:
        """Micro-steps whose activations it keeps at the same time, with 1F1B."""
        return self.layout.pp - self.number

    def part(self, model: ModelSpec) -> float:
        """Of all layers with experts, those of the stage."""
        return self.moe_layers / model.moe_layers

    def dense_parameters(self, model: ModelSpec) -> int:
        """Weights outside the routed experts that a rank has. Routers are on all ranks."""
        if self.layout.pp == self.layout.tp == 1:
            return model.dense_parameters
        moe, dense = self.moe_layers, self.dense_layers
        ends = self.is_first + self.is_last if not model.tied_embedding else self.is_first or self.is_last
        shared: float = ends * model.vocab_size * model.hidden_size + moe * model.shared_parameters
        shared += moe * model.moe_attention.parameters + dense * model.dense_attention.parameters
        shared += dense * model.feed_forward_matrices * model.hidden_size * model.dense_width
        return math.ceil(shared / self.layout.tp) + moe * model.router_parameters


def _stage_needs(
    load: RankLoad,
    model: ModelSpec,
    stage: _Stage,
    groups: int,
    sharding: str,
    checkpointing: Checkpointing,
    times_ranks: int,
) -> dict[str, int]:
    ranks = len(load.homes_R) * times_ranks
    experts_R = -(-load.homes_R * stage.moe_layers // (load.layers * times_ranks))
    expert_R = experts_R * model.expert_parameters
    dense_R = np.full(len(experts_R), stage.dense_parameters(model))
    holders = ranks * groups // stage.layout.tp
    needs: dict[str, Array] = {}
    for name, parameters_R, shards in (("expert", expert_R, groups), ("dense", dense_R, holders)):
        for purpose, (size, is_sharded) in _parameter_bytes(model.weight_bytes, sharding).items():
            needs[f"{name} {purpose}"] = -(-parameters_R * size // (shards if is_sharded else 1))
    if sharding == FSDP:
        layer_R = expert_R // max(1, stage.moe_layers) + dense_R // max(1, stage.moe_layers + stage.dense_layers)
        needs["gathered layers"] = layer_R * (GATHERED_LAYERS * model.weight_bytes + GRADIENT_BYTES)
    needs |= _activations(load, model, stage, groups, checkpointing)
    pool_part = stage.part(model) if load.pool_has_layers else 1.0
    needs["replica pool"] = np.ceil(load.pool_R * pool_part).astype(np.int64)
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


def _activations(
    load: RankLoad, model: ModelSpec, stage: _Stage, groups: int, checkpointing: Checkpointing
) -> dict[str, Array]:
    """`[R]` bytes in the micro-steps in which the rank needs most: activations, output head, dispatch buffers.

    The output head is part of the last stage.
    """
    hidden, wide = model.hidden_size, model.weight_bytes
    again = checkpointing == SELECTIVE
    feed_forward = FEED_FORWARD_WIDTHS - again * AGAIN_FEED_FORWARD_WIDTHS
    kept = (TOKEN_WIDTHS - again * AGAIN_TOKEN_WIDTHS) * hidden + attention_values(model)
    token = wide * (kept + feed_forward * model.shared_width) + ROUTER_BYTES * model.num_experts
    dense_token = wide * (kept + feed_forward * model.dense_width)
    row = wide * (ROW_WIDTHS * model.row_width + feed_forward * model.expert_width)
    tokens_MR, busiest_MR = load.tokens_MR, load.rows_MLR.max(axis=1)
    if checkpointing is True:
        inputs_MR = (stage.moe_layers + stage.dense_layers) * wide * hidden * tokens_MR
        largest_MR = np.maximum(
            token * tokens_MR + row * busiest_MR, bool(model.dense_layers) * dense_token * tokens_MR
        )
        layers_MR = _in_flight(inputs_MR, stage.in_flight, groups) + largest_MR
    else:
        rows_MR = -(-load.rows_MLR.sum(axis=1) * stage.moe_layers // load.layers)
        kept_MR = (stage.moe_layers * token + stage.dense_layers * dense_token) * tokens_MR + row * rows_MR
        layers_MR = _in_flight(kept_MR, stage.in_flight, groups)
    head_MR = stage.is_last * (wide * HEAD_WIDTHS * hidden + LOGIT_BYTES * model.vocab_size) * tokens_MR
    # Rows sent and rows received, of one layer; combine and backward use the same buffers.
    buffers_MR = wide * model.row_width * (model.top_k * tokens_MR + busiest_MR)
    ranks = np.arange(tokens_MR.shape[1])
    most_R = (layers_MR + head_MR + buffers_MR).argmax(axis=0)
    return {
        "activations": layers_MR[most_R, ranks],
        "output head": head_MR[most_R, ranks],
        "dispatch buffers": buffers_MR[most_R, ranks],
    }


def _in_flight(bytes_MR: Array, number: int, groups: int) -> Array:
    """`[M, R]` sums of a micro-step and those before it in the same group, so many in all; mini-batches may mix."""
    sums_MR = np.empty_like(bytes_MR)
    for group in range(groups):
        sums_MR[group::groups] = np.cumsum(bytes_MR[group::groups], axis=0)
    before = number * groups
    sums_MR[before:] -= sums_MR[:-before].copy()
    return sums_MR


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


def ways_to_fit(load: RankLoad, model: ModelSpec, settings: StepSettings, device_bytes: float) -> list[str]:
    """Changes of settings with which the rank of `load` fits; empty if none does.

    First every single option that is enough, else both, then the fewest ranks per expert-parallel group with which the
    rest may stay, else with both options, then the same of pipeline stages. Every rank has as many tokens as before.
    """
    ranks, now = len(load.homes_R), (settings.checkpointing, settings.sharding)
    layers = model.moe_layers + model.dense_layers
    more = SHARDINGS[SHARDINGS.index(settings.sharding) + 1 :]
    singles: list[tuple[Checkpointing, str]] = [
        (True, settings.sharding),
        *((settings.checkpointing, sharding) for sharding in more),
    ]

    def fits(choice: tuple[Checkpointing, str], times_ranks: int = 1, pp: int = settings.layout.pp) -> bool:
        checkpointing, sharding = choice
        needs = rank_memory(
            load, model, groups=settings.groups, sharding=sharding, checkpointing=checkpointing,
            layout=replace(settings.layout, pp=pp), times_ranks=times_ranks,
        )  # fmt: skip
        return sum(needs.values()) <= device_bytes

    def text(choice: tuple[Checkpointing, str]) -> str:
        checkpointing, sharding = choice
        names = ["--recompute-granularity full"] if checkpointing is True and settings.checkpointing is not True else []
        return " ".join((*names, f"--sharding {sharding}") if sharding != settings.sharding else names)

    both: tuple[Checkpointing, str] = (True, FSDP)
    found = [choice for choice in singles if choice != now and fits(choice)]
    if not found:
        found = [*[(True, sharding) for sharding in more if fits((True, sharding))][:1]]
    texts = [f"with {text(choice)}" for choice in found]
    powers = [2**power for power in range(1, model.num_experts.bit_length())]
    larger = [times for times in powers if model.num_experts % (ranks * times) == 0]
    deeper = [settings.layout.pp * times for times in powers if settings.layout.pp * times <= layers]

    def first(values: list[int], enough: Callable[[tuple[Checkpointing, str], int], bool], name: str) -> list[str]:
        """The smallest value with which the rest may stay, else with both options."""
        for choice in dict.fromkeys((now, both)):
            for value in values:
                if enough(choice, value):
                    return [f"{name.format(value)} with {text(choice)}" if text(choice) else name.format(value)]
        return []

    texts += first([ranks * times for times in larger], lambda choice, n: fits(choice, n // ranks), "from EP {}")
    return texts + first(deeper, lambda choice, n: fits(choice, pp=n), "from --pp {}")
