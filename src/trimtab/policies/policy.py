"""The `Policy` protocol of balancers: traits, and a plan made from the data that the balancer may know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, StepCosts
from trimtab.planner import Placement, Schedule, SequenceCounts, StepPlan, Workload
from trimtab.policies.planning_time import NO_PLANNING, HiddenPlanning, PlanningTime

KnownAt = Literal["nothing", "past", "step", "micro-step", "layer"]
# Values of fields of a policy, of which a comparison takes the best.
Choices = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Traits:
    """Properties of a balancer that are not part of its plans.

    Attributes:
        known_at: the latest routing that its decisions see: `nothing`, for a policy without decisions; `past` steps or
            micro-steps only; the whole `step` beforehand; a `micro-step` before it runs; or a `layer` once its router
            has chosen. Splitting tokens over existing copies may always use the live routing.
        planning: planning time. Live planning has a published one, that of UltraEP if the balancer has none, and every
            layer waits for it. Planning from the `step` has a measured one; ranks wait only for what can't run beside
            the rollout or the step, by the rule of `planning_time.py`, which is the same for all. Planning from
            `past` loads is not charged: it runs during earlier steps.
        transfers_start: when its weights may start to move: before the `step`, before the `micro-step`, or in the
            `layer` after its router; `never` if it moves none.
        waits_for_weights: true: weights must be present before tokens are dispatched.
        host_path: true: weights may come from a mirror in host memory.
        hops: 2 if moved tokens are first sent to the home rank, else 1.
        copies: memory of its copies: `none`, slots that layers share, slots of every layer, or `unbounded` memory.
        relocates: true: it moves homes between steps.
        within_node: true: with its own recipe, copies stay inside the node of their home.
        packs_by_length: true: its sequences are packed by their length, as frameworks do today; others by time.
        ideal: true: not a balancer but the bound; tokens count as spread evenly, independent of the plan.
    """

    known_at: KnownAt
    planning: PlanningTime = NO_PLANNING
    transfers_start: Literal["never", "step", "micro-step", "layer"] = "layer"
    waits_for_weights: bool = False
    host_path: bool = False
    hops: Literal[1, 2] = 1
    copies: Literal["none", "shared slots", "layer slots", "unbounded"] = "shared slots"
    relocates: bool = False
    within_node: bool = False
    packs_by_length: bool = False
    ideal: bool = False

    def live_planning_seconds(self, cluster: ClusterSpec) -> float:
        """Returns seconds for which every layer waits for its plan; 0 if planning is not live.

        A balancer that stays inside nodes plans all nodes at the same time.
        """
        if self.ideal or self.known_at != "layer":
            return 0.0
        domain = cluster.ranks_per_node if self.within_node else cluster.ranks
        return self.planning.at(domain).instance * 1e-6

    def hidden_planning(
        self, plan: StepPlan, workload: Workload, lengths: Array, cluster: ClusterSpec, layers: int
    ) -> HiddenPlanning:
        """Returns the times of planning from the step's recorded routing; all 0 for balancers that don't.

        The arguments are those of `HiddenPlanning.of`.
        """
        if self.ideal or self.known_at != "step":
            return HiddenPlanning()
        threads = cluster.planning_threads
        return HiddenPlanning.of(self.planning, plan, workload, lengths, layers=layers, threads=threads)


@dataclass(frozen=True, eq=False)
class View:
    """Input of a policy. It gives access only to the data that the policy's `known_at` allows.

    Attributes:
        known_at: of the policy.
        cluster: ranks, nodes and slots.
        schedule: packed by time or by length. Policies that schedule may replace it, unless terms are equal.
        placement: homes when the step begins. Policies that relocate may replace it, unless terms are equal.
        token_budget: most tokens of a rank in one micro-step, for policies that schedule.
        mini_batch: `[S]` mini-batch of each sequence, for policies that schedule.
        equal_terms: true: schedule, homes and slots are given, so only replicas and split are compared.
        past_counts_PLE: `[P, L, E]` int64, tokens by earlier step (latest last), layer and expert.
        costs: of a step's operations, for policies that use them; None: those of Qwen3-30B-A3B on the cluster.
    """

    known_at: KnownAt
    cluster: ClusterSpec
    schedule: Schedule
    placement: Placement
    token_budget: int
    mini_batch: Array
    equal_terms: bool
    past_counts_PLE: Array
    costs: StepCosts | None
    _sequences: SequenceCounts
    _workload: Workload

    @property
    def sequences(self) -> SequenceCounts:
        """The step's routing by sequence. Only for policies that know the step; LookupError for others."""
        self._check_known_step()
        return self._sequences

    @property
    def workload(self) -> Workload:
        """The step's load under `schedule`. Only for policies that know the step; LookupError for others."""
        self._check_known_step()
        return self._workload

    def _check_known_step(self) -> None:
        if self.known_at != "step":
            raise LookupError(f"a policy that knows at {self.known_at!r} can't see the whole step")

    @property
    def num_layers(self) -> int:
        return self._workload.num_layers

    @property
    def num_experts(self) -> int:
        return self._workload.num_experts

    def plan_instances(
        self, plan_one: Callable[[int, Array, Array], tuple[Array, Array]], *, placement: Placement, slots: int
    ) -> StepPlan:
        """Plan every instance from its own known routes, in the order of execution.

        Args:
            plan_one: from the layer's index, `counts_RE [R, E]` int64 and `home_E [E]` int64 to replicas `[P, 2]`
                (expert, rank) and quotas `[P, R]`. Replicas without any quota are left out.
            slots: replicas of a rank in addition to its homes.
        """
        replicas: list[Array] = []
        quotas: list[Array] = []
        home_LE = placement.home.astype(np.int64)
        for micro_step in range(self._workload.num_micro_steps):
            for layer in range(self.num_layers):
                counts_RE = self._workload.token_counts_MLRE[micro_step, layer].astype(np.int64)
                replicas_P2, quotas_PR = plan_one(layer, counts_RE, home_LE[layer])
                used_P = quotas_PR.sum(axis=1) > 0
                replicas.append(replicas_P2[used_P])
                quotas.append(quotas_PR[used_P])
        return StepPlan.from_instances(
            self.schedule,
            placement,
            replicas,
            quotas,
            mixed_ML=self._workload.mixed_ML,
            cluster=replace(self.cluster, slots_per_rank=slots),
        )


class Policy(Protocol):
    """A balancer. Its parameters are the fields of a frozen dataclass.

    A class attribute `choices`, of type `Choices`, may name values of fields, of which a comparison takes the best.
    """

    @property
    def traits(self) -> Traits: ...

    def plan(self, view: View) -> StepPlan:
        """Plan one step."""
        ...


def with_choices(policy: Policy) -> Sequence[Policy]:
    """The policy with each of the constants that a comparison tries, those of its `choices`; itself if it has none, or
    constants of its own."""
    if hasattr(policy, "choices") and policy != type(policy)():
        return [policy]
    return [replace(policy, **choice) for choice in _choices(policy)]  # type: ignore[type-var]


def chosen_constants(policy: Policy) -> dict[str, Any] | None:
    """The constants of a policy that its `choices` change, by name; None if it has no choice."""
    return {name: getattr(policy, name) for choice in _choices(policy) for name in choice} or None


def _choices(policy: Policy) -> Choices:
    return getattr(policy, "choices", ({},))


def make_view(
    policy: Policy,
    sequences: SequenceCounts,
    schedule: Schedule,
    placement: Placement,
    cluster: ClusterSpec,
    *,
    token_budget: int,
    mini_batch: Array | None = None,
    equal_terms: bool = False,
    past_counts_PLE: Array | None = None,
    costs: StepCosts | None = None,
) -> View:
    """Returns the view of a step for `policy`."""
    nothing = np.zeros((0, sequences.num_layers, sequences.num_experts), np.int64)
    return View(
        known_at=policy.traits.known_at,
        cluster=cluster,
        schedule=schedule,
        placement=placement,
        token_budget=token_budget,
        mini_batch=np.zeros(sequences.num_sequences, np.int64) if mini_batch is None else mini_batch,
        equal_terms=equal_terms,
        past_counts_PLE=nothing if past_counts_PLE is None else past_counts_PLE,
        costs=costs,
        _sequences=sequences,
        _workload=Workload.from_sequences(sequences, schedule),
    )
