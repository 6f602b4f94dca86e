"""Plans of given schedules: their invariants over many random loads, plain recounts, and what a valid plan is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plan_bounds import gap_to_bound
from helpers import planner_reference as reference
from helpers.planner_steps import workloads
from helpers.random_plans import random_plan
from trimtab import ClusterSpec, InputError, Placement, Schedule, StepPlan, Workload
from trimtab.planner import PlanSettings, plan_step

Case = tuple[Workload, Schedule, Placement]


@settings(max_examples=200)
@given(workloads(), st.integers(0, 3), st.integers(1, 64), st.sampled_from([1.0, 1.02, 1.2]))
def test_plans_keep_every_invariant_and_never_hurt(case: Case, slots: int, smallest: int, threshold: float) -> None:
    workload, schedule, placement = case
    per_node = max(d for d in (1, 2, 4) if workload.num_ranks % d == 0)
    cluster = ClusterSpec(workload.num_ranks, per_node, slots)
    plan = plan_step(workload, schedule, placement, cluster, PlanSettings(threshold, smallest))
    plan.check(workload)
    assert np.array_equal(plan.mixed_ML, workload.unknown_MLR.sum(axis=2) > 0)
    loads_MLR, before_MLR = (reference.rank_loads(each, workload) for each in (plan, plan.without_replicas()))
    assert np.array_equal(plan.rank_loads(workload), loads_MLR)
    assert np.array_equal(workload.home_loads(plan.home), before_MLR)
    assert np.all(loads_MLR.max(axis=2) <= before_MLR.max(axis=2))
    shares = np.add.reduceat(plan.quota_tokens, plan.quota_starts[:-1]) if plan.num_replicas else np.empty(0)
    assert np.all(shares >= smallest)
    assert workload.token_counts_MLRE.any() or not plan.num_replicas
    assert gap_to_bound(plan, workload, 4) >= -1e-7
    assert StepPlan.from_bytes(plan.to_bytes()).hash == plan.hash
    assert plan_step(workload, schedule, placement, cluster, PlanSettings(threshold, smallest)).hash == plan.hash


@settings(max_examples=60)
@given(workloads(), st.integers(0, 3), st.integers(0, 99))
def test_random_plans_are_valid_and_counted_right(case: Case, slots: int, seed: int) -> None:
    plan = random_plan(np.random.default_rng(seed), *case[:2], slots=slots, placement=case[2])
    plan.check(case[0])
    assert np.array_equal(plan.rank_loads(case[0]), reference.rank_loads(plan, case[0]))


@settings(max_examples=60)
@given(workloads(), st.integers(0, 3), st.data())
def test_broken_plans_are_refused(case: Case, slots: int, data: st.DataObject) -> None:
    workload, schedule, placement = case
    plan = random_plan(np.random.default_rng(0), workload, schedule, slots=slots, placement=placement)
    breakers: dict[str, dict[str, object]] = {
        "more micro-steps than the workload has": {"mixed_ML": np.append(plan.mixed_ML, plan.mixed_ML[:1], axis=0)},
        "another instance with unknown routes": {"mixed_ML": ~plan.mixed_ML},
        "a home that doesn't exist": {"home": plan.home + np.int16(plan.num_ranks)},
    }
    if plan.num_replicas:
        first_instance = np.searchsorted(plan.replica_starts, 0, side="right") - 1
        ranks = plan.replica_ranks.copy()
        ranks[0] = plan.home[first_instance % plan.num_layers, plan.replica_experts[0]]
        breakers["a replica at home"] = {"replica_ranks": ranks}
        breakers["no slots"] = {"slots_per_rank": 0}
        breakers["a replica nobody starts"] = {"replica_experts": plan.replica_experts[:-1]}
    if len(plan.quota_tokens):
        tokens = plan.quota_tokens.copy()
        tokens[0] = workload.token_counts_MLRE.max() + 1
        breakers["too many tokens"] = {"quota_tokens": tokens}
        breakers["an empty quota"] = {"quota_tokens": np.zeros_like(tokens)}
    name = data.draw(st.sampled_from(sorted(breakers)))
    values = {field: getattr(plan, field) for field in plan.__dataclass_fields__} | breakers[name]
    with pytest.raises(InputError, match="invalid plan"):
        StepPlan(**values).check(workload)


def test_ranks_must_divide_experts() -> None:
    with pytest.raises(InputError, match="3 ranks don't divide 32 experts; use one of 1, 2, 4, 8, 16, 32"):
        Placement.contiguous(1, 32, 3)


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.npz").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"plan\.npz: not a step plan"):
        StepPlan.load(tmp_path / "plan.npz")
    with pytest.raises(InputError, match="no such file"):
        StepPlan.load(tmp_path / "absent.npz")
