"""Random steps for policies, and checks for every policy: valid plans, given terms, no use of later routing."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from trimtab import ClusterSpec, Placement, Schedule, StepPlan, Workload
from trimtab.array_type import Array
from trimtab.planner import SequenceCounts
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
            policy,
            self.sequences,
            self.schedule,
            self.placement,
            self.cluster,
            token_budget=int(self.sequences.lengths.sum()),
            mini_batch=self.schedule.mini_batch_of_micro_step[self.schedule.micro_step].astype(np.int64),
            equal_terms=equal_terms,
            past_counts_PLE=self.past_counts_PLE,
        )

    def workload(self, plan: StepPlan | None = None) -> Workload:
        """The load under the schedule of `plan`, or under the given one."""
        return Workload.from_sequences(self.sequences, self.schedule if plan is None else plan.schedule)

    def known_workload(self) -> Workload:
        """The known rows under the given schedule, which all policies but ours plan by."""
        return Workload.known(self.workload().token_counts_MLRE)


def random_step(
    rng: np.random.Generator,
    *,
    ranks: int,
    experts: int,
    ranks_per_node: int | None = None,
    slots: int = 2,
    layers: int = 2,
    micro_steps: int = 2,
    sequences: int = 12,
    max_length: int = 2000,
    past_steps: int = 0,
    top_k: int = 4,
    contiguous: bool = False,
    all_known: bool = True,
    least: int = 0,
) -> Step:
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
    past_counts_PLE = rng.multinomial(
        10_000, np.exp(skew_LE) / np.exp(skew_LE).sum(-1, keepdims=True), (past_steps, layers)
    )
    return Step(
        SequenceCounts(counts_SLE, lengths.astype(np.int64), unknown_SL),
        schedule,
        Placement.contiguous(layers, experts, ranks) if contiguous else Placement(home_LE),
        ClusterSpec(ranks, ranks if ranks_per_node is None else ranks_per_node, slots),
        past_counts_PLE.astype(np.int64),
    )


@st.composite
def random_steps(draw: st.DrawFn, *, divisible: bool = False) -> Step:
    """Steps of 1 to 8 ranks: odd sizes, empty experts and ranks, unknown routes, with and without a past.

    Args:
        divisible: only ranks that divide the experts.
    """
    ranks = draw(st.integers(1, 8))
    experts = ranks * draw(st.integers(1, 6)) + (0 if divisible else draw(st.integers(0, ranks - 1)))
    return random_step(
        np.random.default_rng(draw(st.integers(0, 2**32))),
        ranks=ranks,
        experts=experts,
        ranks_per_node=draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0])),
        slots=draw(st.integers(0, 3)),
        layers=draw(st.integers(1, 3)),
        micro_steps=draw(st.integers(1, 3)),
        sequences=draw(st.integers(1, 12)),
        max_length=draw(st.sampled_from([1, 20, 2000])),
        past_steps=draw(st.integers(0, 3)),
        contiguous=experts % ranks == 0 and draw(st.booleans()),
        all_known=draw(st.booleans()),
    )


def check_policy(policy: Policy, step: Step) -> dict[str, StepPlan]:
    """Plan on both terms (`own`, `equal`): valid, the same twice, and within the terms. Returns the two plans."""
    plans = {}
    for terms in ("own", "equal"):
        plan = policy.plan(step.view(policy, equal_terms=terms == "equal"))
        plan.check(step.workload(plan))
        again = policy.plan(step.view(policy, equal_terms=terms == "equal"))
        assert plan.hash == again.hash, "planning twice gives two plans"
        if not policy.traits.relocates or terms == "equal":
            assert np.array_equal(plan.home, step.placement.home), "homes moved"
        if terms == "equal":
            assert np.array_equal(plan.micro_step, step.schedule.micro_step), "the schedule changed"
            assert np.array_equal(plan.rank, step.schedule.rank), "the schedule changed"
            assert plan.slots_per_rank <= step.cluster.slots_per_rank, "more slots than the cluster has"
        if policy.traits.copies == "none":
            assert plan.num_replicas == 0, "copies where there should be none"
        if policy.traits.within_node and terms == "own":
            layer = np.repeat(np.arange(len(plan.replica_starts) - 1), np.diff(plan.replica_starts)) % plan.num_layers
            homes = plan.home[layer, plan.replica_experts].astype(np.int64)
            per_node = step.cluster.ranks_per_node
            assert np.array_equal(homes // per_node, plan.replica_ranks // per_node), "a copy left its node"
        plans[terms] = plan
    return plans


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
        plan = policy.plan(step.view(policy, equal_terms=equal_terms))
        layers = plan.num_layers
        for m in range(-1, plan.num_micro_steps):
            for at in range(layers) if known_at == "layer" and m >= 0 else [layers - 1]:
                other_step = poisoned(step, rng, micro_step=m, layer=at)
                other = policy.plan(other_step.view(policy, equal_terms=equal_terms))
                assert np.array_equal(plan.home, other.home), "homes depend on the future"
                decided = m * layers + at + 1
                assert instances(plan)[:decided] == instances(other)[:decided], "an instance depends on a later one"
                if policy.traits.transfers_start == "step":
                    _check_one_topology(plan, other)


def _check_one_topology(*plans: StepPlan) -> None:
    """The replicas of all micro-steps of all plans, taken together, still fit each layer's slots."""
    plan = plans[0]
    copies_LER = np.zeros((plan.num_layers, plan.home.shape[1], plan.num_ranks), bool)
    for one in plans:
        layer = np.repeat(np.arange(len(one.replica_starts) - 1), np.diff(one.replica_starts)) % one.num_layers
        copies_LER[layer, one.replica_experts, one.replica_ranks] = True
    np.put_along_axis(copies_LER, plan.home[:, :, None].astype(np.int64), True, axis=2)
    room = -(-plan.home.shape[1] // plan.num_ranks) + plan.slots_per_rank
    assert copies_LER.sum(axis=1).max(initial=0) <= room, "replicas depend on the step's routing"


def golden(name: str) -> list[dict[str, Any]]:
    """Inputs and outputs of a public planner, made by running it on synthetic loads."""
    path = Path(__file__).parents[1] / "policies" / "golden" / f"{name}.json.gz"
    cases: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["cases"]
    return cases


def instances(plan: StepPlan) -> list[list[tuple[int, int, dict[int, int]]]]:
    """For every instance, in order, its replicas as (expert, rank, tokens by source rank)."""
    listed = []
    for m, layer in np.ndindex(plan.num_micro_steps, plan.num_layers):
        replicas = []
        for p in plan.replicas_of(m, layer):
            quotas = slice(plan.quota_starts[p], plan.quota_starts[p + 1])
            tokens = dict(zip(plan.quota_sources[quotas].tolist(), plan.quota_tokens[quotas].tolist(), strict=True))
            replicas.append((int(plan.replica_experts[p]), int(plan.replica_ranks[p]), tokens))
        listed.append(replicas)
    return listed
