"""Random inputs of the planner, from one instance up to whole steps with odd sizes and holes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.random_plans import random_schedule, random_trace
from trimtab import ClusterSpec, Placement, Schedule, Workload
from trimtab.array_type import Array
from trimtab.cluster import QWEN3_30B, StepCosts
from trimtab.planner import PlannedStep, Planner, PlanSettings, SequenceCounts, plan_sequences
from trimtab.planner.replicas import kernel_values
from trimtab.planner.replicas.kernel_values import Homes, Shares
from trimtab.planner.replicas.replica_search import place_replicas
from trimtab.trace import RoutingTrace

Replicas = list[tuple[int, int, int]]
"""Expert, rank and tokens of each."""


def listed(shares: Shares, count: int) -> Replicas:
    """The first replicas of a kernel's arrays."""
    return [(int(e), int(r), int(t)) for e, r, t in np.stack(shares)[:, :count].T]


def shares_of(replicas: Replicas) -> Shares:
    """Replicas as kernels take them."""
    return Shares(*np.array(replicas, np.int64).reshape(-1, 3).T.copy())


def random_homes(rng: np.random.Generator, layers: int, experts: int, ranks: int) -> Placement:
    """Any homes `[L, E]` with as many experts on every rank."""
    home_E = np.repeat(np.arange(ranks), experts // ranks).astype(np.int16)
    return Placement(np.stack([rng.permutation(home_E) for _ in range(layers)]))


def per_nodes(ranks: int) -> st.SearchStrategy[int]:
    """Ranks per node that make whole nodes."""
    return st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0])


@dataclass(frozen=True, eq=False)
class Instance:
    """What one call of `place_replicas` is given."""

    counts_RE: Array
    fixed_R: Array
    home_E: Array
    per_node: int
    slots: int
    threshold_load: int
    smallest_share: int

    @property
    def ranks(self) -> int:
        return len(self.counts_RE)

    @property
    def counts_E(self) -> Array:
        return self.counts_RE.sum(axis=0, dtype=np.int64)

    def kernel_instance(self) -> kernel_values.InstanceRows:
        """The instance as kernels take it."""
        return kernel_values.InstanceRows(self.counts_E, self.fixed_R, Homes.of(self.home_E, self.ranks))

    def limits(self, reach: int | None = None) -> kernel_values.Limits:
        """Its limits as kernels take them; `reach` as in `PlanSettings.limits`."""
        cluster = ClusterSpec(self.ranks, self.per_node, self.slots)
        return PlanSettings(smallest_share=self.smallest_share).limits(cluster, reach=reach)

    def replicas(self, reach: int | None = None) -> Replicas:
        """Every replica that the kernel places."""
        return listed(*place_replicas(self.kernel_instance(), self.limits(reach), self.threshold_load))

    def loads(self, replicas: Replicas) -> Array:
        """Rows `[R]` that each rank computes."""
        return reference.loads(self.counts_E, self.home_E, replicas, self.fixed_R)


def check_replicas(replicas: Replicas, counts_E: Array, home_E: Array, limits: kernel_values.Limits) -> None:
    """Slots, copies and shares are allowed."""
    at_home_E = counts_E.copy()
    for expert, rank, tokens in replicas:
        assert home_E[expert] != rank
        assert tokens >= limits.smallest_share
        at_home_E[expert] -= tokens
    assert len({(expert, rank) for expert, rank, _ in replicas}) == len(replicas)
    assert all(count <= limits.slots for count in Counter(rank for _, rank, _ in replicas).values())
    assert all(at_home_E[e] == 0 or at_home_E[e] >= limits.smallest_share for e, *_ in replicas)


def random_instance(
    rng: np.random.Generator, *, ranks: int, experts_per_rank: int, per_node: int, slots: int, tokens: int,
    threshold: float, smallest_share: int, unknown: float = 0.0,
) -> Instance:  # fmt: skip
    """Skewed counts of about `tokens` a source rank, some experts empty; a share `unknown` of them is fixed."""
    experts = ranks * experts_per_rank
    weights_E = np.exp(rng.gumbel(size=experts) * rng.uniform(0, 2)) * (rng.random(experts) < 0.8)
    weights_E[rng.integers(experts)] += 1e-9
    home_E = random_homes(rng, 1, experts, ranks).home[0]
    fixed_R = np.zeros(ranks, np.int64)
    if unknown:
        fixed_R = rng.multinomial(round(ranks * tokens * unknown), rng.dirichlet(np.full(ranks, 2.0)))
    known = round(tokens * (1 - unknown))
    counts_RE = rng.multinomial(known, weights_E / weights_E.sum(), size=ranks).astype(np.int32)
    threshold_load = int((counts_RE.sum() + fixed_R.sum()) * threshold // ranks)
    return Instance(counts_RE, fixed_R, home_E, per_node, slots, threshold_load, smallest_share)


@st.composite
def instances(draw: st.DrawFn, *, max_tokens: int = 4000) -> Instance:
    """Instances of one to eight ranks."""
    ranks = draw(st.integers(1, 8))
    return random_instance(
        np.random.default_rng(draw(st.integers(0, 2**32))), ranks=ranks, experts_per_rank=draw(st.integers(1, 6)),
        per_node=draw(per_nodes(ranks)), slots=draw(st.integers(0, 3)), tokens=draw(st.integers(0, max_tokens)),
        threshold=draw(st.sampled_from([0.8, 1.0, 1.005, 1.1, 1.5])),
        smallest_share=draw(st.sampled_from([1, 2, 16, 100])),
        unknown=draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.9, 1.0])),
    )  # fmt: skip


@st.composite
def instances_with_replicas(draw: st.DrawFn, *, max_tokens: int = 60) -> tuple[Instance, Replicas]:
    """An instance with the planner's replicas, or with any other, some without tokens, some with all; by expert."""
    instance = draw(instances(max_tokens=max_tokens))
    if draw(st.booleans()):
        return instance, sorted(instance.replicas(), key=lambda replica: replica[0])
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    left_E, replicas = instance.counts_E.copy(), []
    for expert, rank in rng.permutation([(e, r) for e in range(len(left_E)) for r in range(instance.ranks)]).tolist():
        if instance.home_E[expert] != rank and rng.random() < 0.35:
            tokens = int(rng.choice([0, rng.integers(left_E[expert] + 1), left_E[expert]]))
            left_E[expert] -= tokens
            replicas.append((expert, rank, tokens))
    return instance, sorted(replicas, key=lambda replica: replica[0])


@dataclass(frozen=True, eq=False)
class Step:
    """What `plan_sequences` is given."""

    trace: RoutingTrace
    placement: Placement
    cluster: ClusterSpec
    groups: int
    token_budget: int
    mini_batch: Array
    settings: PlanSettings

    @property
    def sequences(self) -> SequenceCounts:
        return SequenceCounts.from_trace(self.trace)

    def plan(self, **changes: Any) -> PlannedStep:
        """Plan it, with some arguments of `plan_sequences` changed."""
        names = ("sequences", "placement", "cluster", "token_budget", "mini_batch", "groups", "settings")
        values = {name: getattr(self, name) for name in names} | {"costs": free_replicas(self.cluster)}
        return plan_sequences(**values | changes)

    def planner(self) -> Planner:
        """A planner for it; nothing is added yet."""
        costs = free_replicas(self.cluster)
        return Planner(self.cluster, self.placement, groups=self.groups, settings=self.settings, costs=costs)

    def workloads(self, schedule: Schedule) -> list[Workload]:
        """The load of each group, counted by the reference."""
        groups = [schedule.of_group(group, self.cluster.ranks) for group in range(self.groups)]
        return [reference.workload(self.sequences.select(mine), part) for mine, part in groups]


def free_replicas(cluster: ClusterSpec, *, replica_s: float = 0.0) -> StepCosts:
    """Costs with slow rows, of which replicas have none, so that even small steps get some."""
    costs = StepCosts.of(cluster, QWEN3_30B)
    names = ("near_weights_s", "far_weights_s", "near_gradient_s", "far_gradient_s", "host_weights_s", "weights_s")
    return with_operations(costs, **dict.fromkeys(names, replica_s), copy_s=0.0, tile_rows=1, row_s=1e-5)


def with_operations(costs: StepCosts, **seconds: Any) -> StepCosts:
    """With other seconds of some operations."""
    return replace(costs, operations=costs.operations._replace(**seconds))


def free_moves(cluster: ClusterSpec, *, replica_s: float = 0.0) -> StepCosts:
    """As `free_replicas`, and moves have no costs but rows between ranks have."""
    costs = free_replicas(cluster, replica_s=replica_s)
    return with_operations(costs, near_row_s=1e-3, far_row_s=1e-3, near_state_s=0.0, far_state_s=0.0)


def free_moves_only(cluster: ClusterSpec) -> StepCosts:
    """As `free_moves`, but replicas are slow, so that homes are worth improving."""
    return free_moves(cluster, replica_s=10.0)


def skewed_trace(
    rng: np.random.Generator, *, sequences: int, layers: int, experts: int, top_k: int, max_length: int = 40
) -> RoutingTrace:
    """Some experts hot, some empty; each sequence has its own taste."""
    empty_LE = rng.random((layers, experts)).argsort(axis=1) >= max(top_k, experts - 2)
    skew_LE = rng.gumbel(size=(layers, experts)) * rng.uniform(0, 2) - 1e9 * empty_LE
    ids = []
    for _ in range(sequences):
        taste_LE = rng.gumbel(size=(layers, experts)) * rng.uniform(0, 2)
        scores_TLE = rng.gumbel(size=(rng.integers(1, max_length + 1), layers, experts)) + skew_LE + taste_LE
        ids.append(np.argsort(-scores_TLE, axis=-1)[:, :, :top_k])
    return RoutingTrace.from_sequences(ids, num_experts=experts)


def with_missing_routes(rng: np.random.Generator, trace: RoutingTrace) -> RoutingTrace:
    """The same trace, but in a third of the sequences some routes are unknown, in each layer another share."""
    ids_TLK = trace.expert_ids.copy()
    share_SL = rng.choice([0.0, 0.01, 0.3, 1.0], (trace.num_sequences, trace.num_layers))
    share_SL[rng.random(trace.num_sequences) < 0.67] = 0.0
    share_TL = np.repeat(share_SL, trace.sequence_lengths, axis=0)
    ids_TLK[rng.random(share_TL.shape) < share_TL] = trace.no_route
    return replace(trace, expert_ids=ids_TLK)


@st.composite
def steps(draw: st.DrawFn, *, one_node: bool = False) -> Step:
    """Whole steps: 1 to 8 ranks and 1 to 3 groups, down to one expert a rank, one sequence, top-1 and no slots."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8]))
    experts = ranks * draw(st.integers(1, 5))
    layers, sequences = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5, 12, 25]))
    trace = skewed_trace(
        rng, sequences=sequences, layers=layers, experts=experts, top_k=draw(st.integers(1, min(4, experts)))
    )
    if draw(st.booleans()):
        trace = with_missing_routes(rng, trace)
    longest = int(trace.sequence_lengths.max())
    return Step(
        trace=trace,
        placement=random_homes(rng, layers, experts, ranks),
        cluster=ClusterSpec(ranks, ranks if one_node else draw(per_nodes(ranks)), draw(st.integers(0, 3))),
        groups=draw(st.integers(1, 3)),
        token_budget=longest + draw(st.sampled_from([0, 0, 10, 1000])),
        mini_batch=rng.integers(0, draw(st.integers(1, 3)), sequences),
        settings=PlanSettings(draw(st.sampled_from([1.0, 1.005, 1.2])), draw(st.sampled_from([1, 8, 128]))),
    )


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Workload, Schedule, Placement]:
    """Loads with a share of unknown routes, places and homes anywhere."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    experts = ranks * draw(st.integers(1, 6))
    trace = random_trace(
        rng, num_sequences=draw(st.integers(1, 12)), max_length=draw(st.sampled_from([1, 20, 200])),
        num_layers=draw(st.integers(1, 3)), num_experts=experts, top_k=draw(st.integers(1, min(4, experts))),
        unknown=draw(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0])),
    )  # fmt: skip
    schedule = random_schedule(rng, trace.num_sequences, num_ranks=ranks, num_micro_steps=draw(st.integers(1, 3)))
    return Workload.from_trace(trace, schedule), schedule, random_homes(rng, trace.num_layers, experts, ranks)


def steady_step(
    seed: int, *, ranks: int = 4, per_node: int = 2, experts: int = 8, slots: int = 2, groups: int = 1, top_k: int = 2,
    sequences: int = 24, max_length: int = 40, settings: PlanSettings | None = None,
) -> Step:  # fmt: skip
    """One step of given sizes with two mini-batches and two layers, the same for the same seed."""
    rng = np.random.default_rng(seed)
    trace = skewed_trace(rng, sequences=sequences, layers=2, experts=experts, top_k=top_k, max_length=max_length)
    return Step(
        trace=trace,
        placement=random_homes(rng, 2, experts, ranks),
        cluster=ClusterSpec(ranks, per_node, slots),
        groups=groups,
        token_budget=2 * int(trace.sequence_lengths.max()),
        mini_batch=np.arange(sequences) % min(2, sequences),
        settings=settings or PlanSettings(1.0, 4),
    )
