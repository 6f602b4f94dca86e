"""Random steps for policies, and checks for every policy: valid plans, given terms, no use of later routing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from helpers.planner_reference import by_place, loads
from helpers.planner_steps import per_nodes
from trimtab import ClusterSpec, Placement, Schedule, StepPlan, Workload
from trimtab.array_type import Array
from trimtab.planner import SequenceCounts, pack_by_length
from trimtab.planner.replicas.whole_experts import InstanceLoad
from trimtab.policies import Policy, View, make_view


@dataclass(frozen=True)
class Step:
    """Input of a policy; `view` hides routing that the policy does not know."""

    sequences: SequenceCounts
    schedule: Schedule
    placement: Placement
    cluster: ClusterSpec
    past_counts_PLE: Array

    def view(self, policy: Policy, *, equal_terms: bool) -> View:
        return make_view(
            policy, self.sequences, self.schedule, self.placement, self.cluster, equal_terms=equal_terms,
            token_budget=int(self.sequences.lengths.sum()), past_counts_PLE=self.past_counts_PLE,
            mini_batch=self.schedule.mini_batch_of_micro_step[self.schedule.micro_step].astype(np.int64),
        )  # fmt: skip

    def plan(self, policy: Policy, *, equal_terms: bool = False) -> StepPlan:
        return policy.plan(self.view(policy, equal_terms=equal_terms))

    def workload(self, plan: StepPlan | None = None) -> Workload:
        """The load under the schedule of `plan`, or under the given one."""
        return Workload.from_sequences(self.sequences, self.schedule if plan is None else plan.schedule)

    def known_workload(self) -> Workload:
        """The known rows under the given schedule, which all policies but ours plan by."""
        return Workload.known(self.workload().token_counts_MLRE)


def random_step(
    rng: np.random.Generator, *, ranks: int, experts: int, ranks_per_node: int | None = None, slots: int = 2,
    layers: int = 2, micro_steps: int = 2, sequences: int = 12, max_length: int = 2000, past_steps: int = 0,
    top_k: int = 4, contiguous: bool = False, all_known: bool = True, least: int = 0,
) -> Step:  # fmt: skip
    """Skewed sequences anywhere in the schedule. Some ranks may have nothing to do, some experts no token.

    Args:
        contiguous: contiguous homes, else random ones, at most ceil(E / R) a rank. Ranks must divide the experts.
        all_known: false: one sequence in five has unknown routes, up to all of them, in every layer.
        least: fewest tokens of every sequence and expert.
    """
    skew_LE = rng.gumbel(size=(layers, experts)) * rng.uniform(0, 2)
    weights_SLE = np.exp(rng.gumbel(size=(sequences, layers, experts)) * rng.uniform(0, 1) + skew_LE)
    weights_SLE /= weights_SLE.sum(axis=-1, keepdims=True)
    lengths = rng.integers(1, max_length + 1, sequences)
    counts_SLE = np.zeros((sequences, layers, experts), np.int32)
    for s, layer in np.ndindex(sequences, layers):
        counts_SLE[s, layer] = rng.multinomial(int(lengths[s]) * min(top_k, experts), weights_SLE[s, layer]) + least
    unknown_SL = np.zeros((sequences, layers), np.int32)
    if not all_known:
        known_SL = np.where(rng.random((sequences, 1)) < 0.2, rng.choice([0.0, 0.5, 0.9], (sequences, layers)), 1.0)
        rows_SL = counts_SLE.sum(axis=2)
        counts_SLE = rng.binomial(counts_SLE, known_SL[:, :, None]).astype(np.int32)
        unknown_SL = (rows_SL - counts_SLE.sum(axis=2)).astype(np.int32)
    schedule = Schedule(
        micro_step=rng.integers(0, micro_steps, sequences).astype(np.int32),
        rank=rng.integers(0, ranks, sequences).astype(np.int32),
        mini_batch_of_micro_step=np.zeros(micro_steps, np.int32),
        num_ranks=ranks,
    )
    home_E = (np.arange(experts) * ranks // experts).astype(np.int16)
    home_LE = np.stack([home_E if contiguous else rng.permutation(home_E) for _ in range(layers)])
    popularity_LE = np.exp(skew_LE) / np.exp(skew_LE).sum(axis=-1, keepdims=True)
    past_counts_PLE = rng.multinomial(10_000, popularity_LE, (past_steps, layers))
    return Step(
        SequenceCounts(counts_SLE, lengths.astype(np.int64), unknown_SL),
        schedule,
        Placement.contiguous(layers, experts, ranks) if contiguous else Placement(home_LE),
        ClusterSpec(ranks, ranks if ranks_per_node is None else ranks_per_node, slots),
        past_counts_PLE.astype(np.int64),
    )


@st.composite
def random_steps(draw: st.DrawFn) -> Step:
    """Steps of 1 to 8 ranks: odd sizes, empty experts and ranks, unknown routes, with and without a past."""
    ranks = draw(st.integers(1, 8))
    experts = ranks * draw(st.integers(1, 6)) + draw(st.integers(0, ranks - 1))
    return random_step(
        np.random.default_rng(draw(st.integers(0, 2**32))), ranks=ranks, experts=experts,
        ranks_per_node=draw(per_nodes(ranks)), slots=draw(st.integers(0, 3)), layers=draw(st.integers(1, 3)),
        micro_steps=draw(st.integers(1, 3)), sequences=draw(st.integers(1, 12)),
        max_length=draw(st.sampled_from([1, 20, 2000])), past_steps=draw(st.integers(0, 3)),
        contiguous=experts % ranks == 0 and draw(st.booleans()), all_known=draw(st.booleans()),
    )  # fmt: skip


def check_policy(policy: Policy, step: Step) -> dict[str, StepPlan]:
    """Plan on both terms (`own`, `equal`): valid, the same twice, and within the terms. Returns the two plans."""
    plans = {}
    for terms in ("own", "equal"):
        plan = step.plan(policy, equal_terms=terms == "equal")
        plan.check(step.workload(plan))
        assert plan.hash == step.plan(policy, equal_terms=terms == "equal").hash, "planning twice gives two plans"
        if not policy.traits.relocates or terms == "equal":
            assert np.array_equal(plan.home, step.placement.home), "homes moved"
        if terms == "equal":
            assert np.array_equal(plan.micro_step, step.schedule.micro_step), "the schedule changed"
            assert np.array_equal(plan.rank, step.schedule.rank), "the schedule changed"
            assert plan.slots_per_rank <= step.cluster.slots_per_rank, "more slots than the cluster has"
        if policy.traits.copies == "none":
            assert plan.num_replicas == 0, "copies where there should be none"
        if policy.traits.within_node and terms == "own":
            assert not off_node(plan).any(), "a copy left its node"
        plans[terms] = plan
    return plans


def check_packing(policy: Policy, step: Step, mini_batch_S: Array, *, token_budget: int) -> tuple[View, StepPlan]:
    """Plan a step that is packed by length: the same mini-batches and micro-steps, within the budget.

    Returns the view, whose schedule is the packed one, and the plan.
    """
    lengths, ranks = step.sequences.lengths, step.cluster.ranks
    packed = pack_by_length(lengths, num_ranks=ranks, token_budget=token_budget, mini_batch=mini_batch_S)
    view = replace(replace(step, schedule=packed).view(policy, equal_terms=False), token_budget=token_budget)
    plan = policy.plan(view)
    plan.check(step.workload(plan))
    assert np.array_equal(plan.mini_batch_of_micro_step, packed.mini_batch_of_micro_step)
    assert np.array_equal(plan.mini_batch_of_micro_step[plan.micro_step], mini_batch_S)
    assert by_place(plan.schedule, lengths).max() <= token_budget
    return view, plan


def layers_of(plan: StepPlan) -> Array:
    """The layer of every replica."""
    return np.repeat(np.arange(len(plan.replica_starts) - 1), np.diff(plan.replica_starts)) % plan.num_layers


def off_node(plan: StepPlan) -> Array:
    """For every replica, whether it is on another node than its home."""
    homes_P = plan.home[layers_of(plan), plan.replica_experts].astype(np.int64)
    return np.asarray(homes_P // plan.ranks_per_node != plan.replica_ranks // plan.ranks_per_node)


def poisoned(step: Step, rng: np.random.Generator, *, micro_step: int = -1, layer: int = 0) -> Step:
    """The same step with other routing in every instance after (`micro_step`, `layer`); by default in all of them."""
    of_step_S = step.schedule.micro_step
    counts_SLE = step.sequences.counts_SLE.copy()
    for at in range(step.sequences.num_layers):
        later_S = (of_step_S > micro_step) | ((of_step_S == micro_step) & (at > layer))
        counts_SLE[later_S, at] = counts_SLE[later_S, at][:, rng.permutation(step.sequences.num_experts)]
    return replace(step, sequences=replace(step.sequences, counts_SLE=counts_SLE))


def check_future_is_unseen(policy: Policy, step: Step, rng: np.random.Generator) -> None:
    """Replace later routing, at every instance of the step; decisions made before stay the same.

    Earlier instances are equal to the token. If weights move before the step, copies do not depend on its routing:
    those of both runs together fit the slots.
    """
    known_at = policy.traits.known_at
    assert known_at != "step", "a policy that knows the step has no later routing"
    for equal_terms in (False, True):
        plan = step.plan(policy, equal_terms=equal_terms)
        layers, room = plan.num_layers, -(-plan.home.shape[1] // plan.num_ranks) + plan.slots_per_rank
        for m in range(-1, plan.num_micro_steps):
            for at in range(layers) if known_at == "layer" and m >= 0 else [layers - 1]:
                other = poisoned(step, rng, micro_step=m, layer=at).plan(policy, equal_terms=equal_terms)
                assert np.array_equal(plan.home, other.home), "homes depend on the future"
                decided = m * layers + at + 1
                assert instances(plan)[:decided] == instances(other)[:decided], "an instance depends on a later one"
                if policy.traits.transfers_start == "step":
                    assert copies_of_a_layer(plan, other) <= room, "replicas depend on the step's routing"


def copies_of_a_layer(*plans: StepPlan) -> int:
    """The most copies that a rank has of one layer, those of all micro-steps of all plans taken together."""
    plan = plans[0]
    copies_LER = np.zeros((plan.num_layers, plan.home.shape[1], plan.num_ranks), bool)
    for one in plans:
        copies_LER[layers_of(one), one.replica_experts, one.replica_ranks] = True
    np.put_along_axis(copies_LER, plan.home[:, :, None].astype(np.int64), True, axis=2)
    return int(copies_LER.sum(axis=1).max(initial=0))


def golden(name: str) -> list[dict[str, Any]]:
    """Inputs and outputs of a public planner, made by running it on synthetic loads."""
    path = Path(__file__).parents[1] / "policies" / "golden" / f"{name}.json.gz"
    return list(json.loads(gzip.decompress(path.read_bytes()))["cases"])


def skewed_load(
    seed: int, ranks: int, experts: int, *, zipf: float, tokens: int, per_node: int = 8, slots: int = 2
) -> InstanceLoad:
    """About `tokens` a rank, of experts whose popularity follows Zipf's law, with contiguous homes; one domain."""
    rng = np.random.default_rng(seed)
    popularity_E = rng.permutation(np.arange(1, experts + 1) ** -zipf)
    counts_E = rng.multinomial(tokens * ranks, popularity_E / popularity_E.sum())
    home_E = np.arange(experts) * ranks // experts
    return InstanceLoad.of(counts_E, home_E, ClusterSpec(ranks, min(per_node, ranks), slots), within_node=False)


@st.composite
def random_loads(
    draw: st.DrawFn, sizes: list[tuple[int, int]], *, within_node: bool, most_slots: int = 4
) -> InstanceLoad:
    """Loads with few or many tokens, a fifth of the experts without any, and as many experts on every rank.

    Args:
        sizes: ranks, and ranks per node.
    """
    ranks, per_node = draw(st.sampled_from(sizes))
    experts = ranks * draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts_E = rng.integers(0, draw(st.sampled_from([2, 100, 5000])), experts) * (rng.random(experts) < 0.8)
    home_E, slots = rng.permutation(np.arange(experts) % ranks), draw(st.integers(0, most_slots))
    return InstanceLoad.of(counts_E, home_E, ClusterSpec(ranks, per_node, slots), within_node=within_node)


def loads_after(load: InstanceLoad, replicas: Iterable[Iterable[int]]) -> Array:
    """Rows `[R]` of every rank with some replicas (expert, rank, tokens)."""
    return loads(load.counts_E, load.home_E, replicas, np.zeros_like(load.loads_R))


def instances(plan: StepPlan) -> list[list[tuple[int, int, dict[int, int]]]]:
    """For every instance, in order, its replicas as (expert, rank, tokens by source rank)."""
    quotas = list(zip(plan.quota_sources.tolist(), plan.quota_tokens.tolist(), strict=True))
    tokens_P = [dict(quotas[start:end]) for start, end in pairwise(plan.quota_starts.tolist())]
    replicas = list(zip(plan.replica_experts.tolist(), plan.replica_ranks.tolist(), tokens_P, strict=True))
    return [replicas[start:end] for start, end in pairwise(plan.replica_starts.tolist())]
