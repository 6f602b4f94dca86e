"""All micro-steps of a layer against one instance at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import planner_reference as reference
from helpers.planner_steps import Instance, per_nodes, random_instance
from trimtab import ClusterSpec
from trimtab.planner import PlanSettings
from trimtab.planner.replicas.kernel_values import PARTS_PER_WHOLE
from trimtab.planner.replicas.layer_plan import plan_layer
from trimtab.planner.replicas.replica_table import ReplicaTable

THRESHOLD = 1.01


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[Instance], list[bool]]:
    """Instances with the same homes, and which of them may have replicas."""
    ranks = draw(st.integers(1, 6))
    sizes = {
        "ranks": ranks,
        "experts_per_rank": draw(st.integers(1, 4)),
        "per_node": draw(per_nodes(ranks)),
        "slots": draw(st.integers(0, 3)),
        "smallest_share": draw(st.sampled_from([1, 16])),
    }
    unknown = draw(st.sampled_from([0.0, 0.2, 0.8]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    micro_steps = draw(st.integers(1, 6))
    chosen = [
        random_instance(rng, tokens=300, threshold=THRESHOLD, unknown=unknown, **sizes) for _ in range(micro_steps)
    ]
    return chosen, [draw(st.booleans()) for _ in chosen]


def plan(instances: list[Instance]) -> ReplicaTable:
    """Plan the instances as layer 1 of three; the others are full of other tokens."""
    one = instances[0]
    limits = PlanSettings(THRESHOLD, one.smallest_share).limits(ClusterSpec(one.ranks, one.per_node, one.slots))
    counts_MLRE = np.full((len(instances), 3, *one.counts_RE.shape), 99, np.int32)
    counts_MLRE[:, 1] = np.stack([instance.counts_RE for instance in instances])
    # Not contiguous, like one layer of several.
    fixed_MLR = np.full((len(instances), 3, one.ranks), 99)
    fixed_MLR[:, 1] = np.stack([instance.fixed_R for instance in instances])
    return plan_layer(counts_MLRE, fixed_MLR[:, 1], 1, one.home_E, limits)


@settings(max_examples=60)
@given(layers())
def test_a_layer_without_unwanted_replicas_is_the_wanted_instances_planned_alone(
    case: tuple[list[Instance], list[bool]],
) -> None:
    check(*case)


def check(instances: list[Instance], wanted: list[bool]) -> None:
    home_E = instances[0].home_E
    listed: list[list[reference.Replica]] = []
    quotas: list[list[tuple[int, int]]] = []
    for instance, may in zip(instances, wanted, strict=True):
        parts = int(instance.counts_RE.sum() + instance.fixed_R.sum()) * round(THRESHOLD * PARTS_PER_WHOLE)
        alone = replace(instance, home_E=home_E, threshold_load=parts // (instance.ranks * PARTS_PER_WHOLE))
        # By expert, for the split.
        listed.append(sorted(alone.replicas(), key=lambda replica: replica[0]) if may else [])
        quotas += reference.split_tokens(instance.counts_RE, home_E, instance.per_node, listed[-1])
    actual = plan(instances).select(np.arange(len(instances)), np.array(wanted))
    assert np.diff(actual.replica_starts).tolist() == [len(replicas) for replicas in listed]
    assert actual.experts.tolist() == [expert for replicas in listed for expert, _, _ in replicas]
    assert actual.ranks.tolist() == [rank for replicas in listed for _, rank, _ in replicas]
    assert np.diff(actual.quota_starts).tolist() == [len(mine) for mine in quotas]
    assert actual.sources.tolist() == [source for mine in quotas for source, _ in mine]
    assert actual.tokens.tolist() == [tokens for mine in quotas for _, tokens in mine]
    dtypes = [values.dtype for values in (actual.experts, actual.ranks, actual.sources, actual.tokens)]
    assert dtypes == [np.int16, np.int16, np.int16, np.int32]


def test_many_micro_steps_with_many_quotas() -> None:
    ranks = 5
    counts_RE = np.zeros((ranks, ranks), np.int32)
    counts_RE[:, 0] = 1000 + np.arange(ranks)
    one = Instance(counts_RE, np.zeros(ranks, np.int64), np.arange(ranks)[::-1].astype(np.int16), ranks, 1, 0, 1)
    check([one] * 40, [True] * 40)
    rng = np.random.default_rng(0)
    sizes = {"ranks": 6, "experts_per_rank": 3, "per_node": 2, "slots": 3, "smallest_share": 1}
    check([random_instance(rng, tokens=300, threshold=THRESHOLD, **sizes) for _ in range(40)], [True] * 40)
