"""Simulation of a step under a plan: its time and the parts of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, Layout, ModelSpec
from trimtab.cluster.operations import OperationCosts
from trimtab.cluster.parallel_layout import ZERO1, Checkpointing
from trimtab.cluster.specs import RING_LAYERS
from trimtab.planner import Placement, StepPlan, Workload
from trimtab.planner.plan.rank_work import even_work, rank_work
from trimtab.planner.plan.step_times import dense_seconds, exchange_seconds, moving_seconds, refresh_seconds
from trimtab.planner.replicas.paths import HOST, PEER, layers_of_replicas
from trimtab.policies.policy import Traits
from trimtab.simulator.pipeline import BUBBLE, PassTimes, Pipeline
from trimtab.simulator.resampling import ResampledTrace
from trimtab.simulator.timeline import Rounds, run_step
from trimtab.simulator.token_replay import count_transfers
from trimtab.timeline import PARTS
from trimtab.timeline.layer_passes import (
    AT_LAYER,
    AT_MICRO_STEP,
    AT_STEP,
    KEPT,
    NONE,
    SHARED,
    UNBOUNDED,
    RankWork,
    Recipe,
    Run,
)
from trimtab.timeline.recorded_operations import Operations
from trimtab.timeline.replica_transfers import Copies
from trimtab.trace import RoutingTrace

STORES = {"none": NONE, "shared slots": SHARED, "layer slots": KEPT, "unbounded": UNBOUNDED}
STARTS = {"never": AT_STEP, "step": AT_STEP, "micro-step": AT_MICRO_STEP, "layer": AT_LAYER}
# Most operations of a rank in a layer, in two forwards and a backward, and outside of layers.
OPERATIONS_PER_LAYER, OPERATIONS_OUTSIDE = 34, 6
# Names of causes, see `SimulatedStep.causes_s`.
WAITING, SEQUENCES = "waiting", "sequences"


@dataclass(frozen=True)
class StepSettings:
    """Execution settings of a step, independent of the balancer.

    Attributes:
        groups: expert-parallel groups that share the homes. Micro-steps of a mini-batch alternate between them.
        meet: groups synchronise in every `layer`, as when dense parameters are gathered there, or only at the end of a
            mini-batch (`step`).
        ring_layers: layers with replicas in shared slots at the same time, one in use and the others prefetched.
        recompute: true: log-probabilities are recomputed before the update.
        sharding: training state that data ranks share out, one of `SHARDINGS`. It changes memory, and what moves cost.
        checkpointing: true: activations are computed again before backward, in another forward of the micro-step;
            `selective`: those that are cheap to compute, in backward.
        layout: tensor, pipeline and context parallelism.
        counted_rows: rows of a step whose transfers are counted one by one; of larger steps, some micro-steps are. With
            the default a step of two million tokens is less than 0.1% from one of which all rows are counted.
    """

    groups: int = 1
    meet: str = "step"
    ring_layers: int = RING_LAYERS
    recompute: bool = True
    sharding: str = ZERO1
    checkpointing: Checkpointing = False
    counted_rows: int = 1 << 24
    layout: Layout = field(default_factory=Layout)


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """Result of a simulated step.

    Attributes:
        step_time_s: seconds of recompute and update, including moves and the part of planning before them.
        parts_s: seconds on the critical path, by the names of `PARTS`; they add up to `step_time_s`. With a pipeline
            those of the mean stage, and `BUBBLE`: what it takes longer.
        causes_s: seconds by cause; they add up to `step_time_s`, too. `waiting`: what the step would be shorter if
            every expert phase took the ranks' mean time, with the same rows. `sequences`: what
            it would then be shorter if all ranks had the mean time of dense parts: the cost of uneven sequences. The
            others are the parts of that even step, by the names of `PARTS` but `imbalance`.
        work: of every rank and instance.
        operations: of the shown micro-step, from the start of its update.
        hidden_planning_s: seconds of planning from recorded routing, during rollout and step, for which no rank waits.
    """

    step_time_s: float
    parts_s: dict[str, float]
    causes_s: dict[str, float]
    work: RankWork
    operations: Operations
    hidden_planning_s: float


def imbalance_cost(static_s: float, even_s: float) -> float:
    """The part of a step that imbalance costs, 0 to 1: what it is shorter with perfectly even routing."""
    return max(0.0, 1 - even_s / static_s) if static_s else 0.0


def simulate_step(
    plan: StepPlan,
    workload: Workload,
    lengths: Array,
    costs: OperationCosts,
    cluster: ClusterSpec,
    traits: Traits,
    *,
    before: Placement | None = None,
    settings: StepSettings | None = None,
    model: ModelSpec | None = None,
    show: int | None = None,
    trace: RoutingTrace | ResampledTrace | None = None,
    order_LE: Array | None = None,
) -> SimulatedStep:
    """Simulate a plan on a cluster.

    Args:
        workload: the load of the plan.
        lengths: `[S]` tokens of each sequence.
        traits: when the balancer plans and transfers.
        before: homes from which the step's moves start; those of the plan by default.
        model: whose layers the plan has, or some of them. Planning from recorded routing is then that of all layers, in
            proportion. Needed for a pipeline.
        show: the micro-step whose operations are recorded, if any.
        trace: the sequences with their tokens, from which transfers are counted where tokens share them; without it
            they are estimated from counts of rows.
        order_LE: `[L, E]` the trace's ids by those of the plan; the same by default.
    """
    chosen = settings or StepSettings()
    counts_MLRE = workload.estimated_MLRE
    if traits.ideal:
        work = even_work(counts_MLRE, plan.ranks_per_node, costs)
    else:
        work = rank_work(plan.replicas, plan.home, counts_MLRE, plan.ranks_per_node, costs, hops=traits.hops)
        if trace is not None and costs.top_k > 1:
            near_MLR, far_MLR, known_ML = count_transfers(
                plan, trace, hops=traits.hops, most_rows=chosen.counted_rows, order_LE=order_LE
            )
            work = _with_counted_transfers(work, near_MLR * costs.near_row_s, far_MLR * costs.far_row_s, known_ML)
    attention_MR, outer_MR = dense_seconds(plan.schedule, lengths, costs)
    paths_P = _paths(plan, cluster, traits)
    all_layers = model.moe_layers if model else plan.num_layers
    stages = chosen.layout.pp
    planning = traits.hidden_planning(plan, workload, lengths, cluster, all_layers)
    traced = plan.num_layers / all_layers
    refresh_s = refresh_seconds(plan.home, plan.replicas, paths_P, plan.num_ranks, plan.ranks_per_node, costs)
    moving_s = 0.0 if before is None else moving_seconds(before.home, plan.home, plan.ranks_per_node, costs)
    # Rounds of planning run beside the moves of homes, which precede the timeline. It runs the stages of a pipeline one
    # after another, so that a micro-step takes longer there.
    rounds = _rounds(plan, chosen.groups, planning.round_s * traced * stages, -moving_s)
    ranks = plan.num_ranks * chosen.groups
    copies = _copies(plan, paths_P, kept=STORES[traits.copies] == KEPT)
    recipe = Recipe(
        store=STORES[traits.copies],
        start=STARTS[traits.transfers_start],
        places=chosen.ring_layers,
        hops=traits.hops,
        waits_first=traits.waits_for_weights,
        groups_meet=chosen.meet == "layer",
        planning_s=traits.live_planning_seconds(cluster),
    )

    exchange: tuple[Array, ...] = ()
    if chosen.layout.pieces > 1:
        exchange = exchange_seconds(plan.schedule, lengths, costs)
    pipeline = None
    if stages > 1:
        assert model
        send_M = _most_tokens(plan, lengths) * (costs.send_token_s * traced)
        pipeline = Pipeline.of(chosen.layout, model, plan.num_layers, costs.head_part, send_M)

    def run(work: RankWork, dense: tuple[Array, ...], shown_round: int) -> tuple[float, dict[str, float], Operations]:
        """Seconds of the timeline, in all and by part, and operations."""
        times = PassTimes() if pipeline else None
        passes = Run.at_zero(dense, work, costs, recipe, copies, groups=chosen.groups)
        operations = run_step(
            passes,
            rounds,
            costs,
            refresh_s=refresh_s,
            recompute=chosen.recompute,
            checkpointing=chosen.checkpointing is True,
            shown_round=shown_round,
            memory=ranks * (plan.num_layers * OPERATIONS_PER_LAYER + OPERATIONS_OUTSIDE)
            + 4 * chosen.groups * plan.num_replicas,
            times=times,
        )
        parts_s = dict(zip(PARTS, passes.clocks.parts_DP[0].tolist(), strict=True))
        time_s = float(passes.clocks.time_D[0])
        if not pipeline or not times:
            return time_s, parts_s, operations
        bubble_s = times.bubble(pipeline)
        parts_s = {part: seconds / stages for part, seconds in parts_s.items()} | {BUBBLE: bubble_s}
        return time_s / stages + bubble_s, parts_s, operations

    dense = (attention_MR, outer_MR, *exchange)
    show_round = -1 if show is None else int(np.argwhere(rounds.order_QG == show)[0, 0])
    time_s, parts_s, operations = run(work, dense, show_round)
    even_experts = work._replace(experts_MLR=_even(work.experts_MLR), moved_MLR=_even(work.moved_MLR))
    even_experts_s, _, _ = run(even_experts, dense, -1)
    even_s, even_parts_s, _ = run(even_experts, tuple(map(_even, dense)), -1)
    # Each stage moves its own homes, and writes its own mirrors.
    refresh_s, moving_s = refresh_s / stages, moving_s / stages
    header_s = planning.header_s * traced
    hidden_s = 0.0
    if traits.known_at == "step":
        planned_s = (planning.rollout_s + len(rounds.ready_Q) * planning.round_s) * traced
        hidden_s = max(0.0, planned_s - parts_s["planning"])
    for found in (parts_s, even_parts_s):
        found["planning"] += header_s
        found["migration"] += refresh_s + moving_s
    # With two hops, moved experts are no part of any mean.
    waiting_s = time_s - even_experts_s + even_parts_s.pop("imbalance")
    causes_s = {WAITING: waiting_s, SEQUENCES: even_experts_s - even_s, **even_parts_s}
    step_time_s = time_s + header_s + refresh_s + moving_s
    return SimulatedStep(step_time_s, parts_s, causes_s, work, operations, hidden_s)


def mean_step(steps: Sequence[SimulatedStep]) -> SimulatedStep:
    """The mean seconds of several steps, with load and operations of the last one."""

    def mean(seconds: Iterable[float]) -> float:
        return math.fsum(seconds) / len(steps)

    return replace(
        steps[-1],
        step_time_s=mean(step.step_time_s for step in steps),
        parts_s={part: mean(step.parts_s[part] for step in steps) for part in steps[0].parts_s},
        causes_s={cause: mean(step.causes_s[cause] for step in steps) for cause in steps[0].causes_s},
        hidden_planning_s=mean(step.hidden_planning_s for step in steps),
    )


def _even(seconds: Array) -> Array:
    """`[..., R]`: the mean of the ranks for each of them."""
    return np.repeat(seconds.mean(axis=-1, keepdims=True), seconds.shape[-1], axis=-1)


def _most_tokens(plan: StepPlan, lengths: Array) -> Array:
    """`[M]` tokens of the rank that has most."""
    tokens_MR = np.zeros((plan.num_micro_steps, plan.num_ranks), np.int64)
    np.add.at(tokens_MR, (plan.micro_step, plan.rank), lengths)
    return np.asarray(tokens_MR.max(axis=1))


def _with_counted_transfers(work: RankWork, near_MLR: Array, far_MLR: Array, known_ML: Array) -> RankWork:
    """Work with the seconds of the transfers of tokens, where they were counted.

    In micro-steps that were not, the estimates are scaled as they are in those that were, by layer.
    """
    known_ML1, missed_M11 = known_ML[:, :, None], np.logical_not(known_ML.any(axis=1))[:, None, None]
    kinds = {"near_MLR": near_MLR, "far_MLR": far_MLR}
    for name, counted_MLR in kinds.items():
        estimated_MLR = getattr(work, name)
        sums_L, estimated_L = ((each * known_ML1).sum(axis=(0, 2)) for each in (counted_MLR, estimated_MLR))
        ratio_L = np.divide(sums_L, estimated_L, out=np.ones(len(sums_L)), where=estimated_L > 0)
        scaled_MLR = np.where(missed_M11, estimated_MLR * ratio_L[:, None], estimated_MLR)
        kinds[name] = np.where(known_ML1, counted_MLR, scaled_MLR)
    return work._replace(**kinds)


def _rounds(plan: StepPlan, groups: int, round_s: float, start_s: float) -> Rounds:
    """Micro-steps of each mini-batch alternate between groups. Every group plans its own, one after another.

    Args:
        round_s: seconds to plan a micro-step.
        start_s: when planning starts, on the clocks of the timeline.
    """
    order, mini_batch, closes = [], [], []
    for batch in range(int(plan.mini_batch_of_micro_step.max(initial=0)) + 1):
        mine = plan.schedule.micro_steps_of(batch)
        rounds = -(-len(mine) // groups)
        order_QG = np.full((rounds, groups), -1, np.int64)
        order_QG.ravel()[: len(mine)] = mine
        closes_QG = np.zeros((rounds, groups), bool)
        closes_QG.ravel()[max(0, len(mine) - groups) : len(mine)] = True
        order.append(order_QG)
        closes.append(closes_QG)
        mini_batch += [batch] * rounds
    ready_Q = start_s + round_s * np.arange(1, len(mini_batch) + 1)
    return Rounds(np.concatenate(order), np.array(mini_batch, np.int64), np.concatenate(closes), ready_Q)


def _paths(plan: StepPlan, cluster: ClusterSpec, traits: Traits) -> Array:
    """`[P]` uint8: without a mirror, a balancer transfers all weights from the homes, if ranks have links."""
    if traits.host_path or not (cluster.node_bytes_per_s and cluster.network_bytes_per_s):
        return plan.replica_paths
    return np.full_like(plan.replica_paths, PEER)


def _copies(plan: StepPlan, paths_P: Array, *, kept: bool) -> Copies:
    """Replicas by instance; if they are kept for the step, by layer, and once for all micro-steps that use them."""
    layer_P = layers_of_replicas(plan.replica_starts, plan.num_layers)
    starts, home_P, rank_P = plan.replica_starts, plan.home[layer_P, plan.replica_experts], plan.replica_ranks
    if kept:
        copies = np.stack([layer_P, plan.replica_experts, rank_P, home_P, paths_P]).astype(np.int64)
        layer_P, _, rank_P, home_P, paths_P = np.unique(copies, axis=1)
        starts = np.searchsorted(layer_P, np.arange(plan.num_layers + 1))
    return Copies.of(starts, home_P, rank_P, paths_P == HOST, plan.ranks_per_node)
