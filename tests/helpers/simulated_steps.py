"""Random steps to simulate, with any plan, costs and traits; and small ones for tests by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from helpers.random_plans import random_placement, random_plan, random_trace
from helpers.simulator_reference import ReferenceStep, simulate_reference
from trimtab import ClusterSpec, Placement, Schedule, StepPlan, Workload
from trimtab.array_type import Array
from trimtab.cluster.operations import OperationCosts
from trimtab.policies import Traits
from trimtab.policies.planning_time import FREE, Exchange, PlanningTime, TimeAtSize
from trimtab.simulator.step import SimulatedStep, StepSettings, simulate_step

# Fields of `OperationCosts` that are no seconds.
RATIOS = (
    "dense_backward", "expert_backward", "near_spare", "far_spare", "near_share", "far_share", "head_part",
    "transfer_tax",
)  # fmt: skip
OTHERS = ("tile_rows", "forwards", "reach", "chunked", "top_k", "expert_groups", "groups_per_token", "pieces")
SECONDS = tuple(name for name in OperationCosts._fields if name not in (*RATIOS, *OTHERS))
# One group of experts, whole sequences, one pipeline stage.
UNDIVIDED: dict[str, Any] = {"expert_groups": 1, "groups_per_token": 1, "pieces": 1, "head_part": 0.0}
# What takes no time with links that are infinitely fast.
WEIGHTS = ("near_weights_s", "far_weights_s", "host_weights_s")
GRADIENTS = ("near_gradient_s", "far_gradient_s")
MOVES = ("near_state_s", "far_state_s")
ROWS = ("near_row_s", "far_row_s", "hop_row_s")
# Parts of planning from recorded routing, by their names in `TimeAtSize`.
PLANNING_PARTS = ("schedule", "schedule_instance", "homes", "homes_instance", "choice", "join")


@dataclass(frozen=True, eq=False)
class Case:
    """What `simulate_step` is given."""

    plan: StepPlan
    workload: Workload
    lengths: Array
    costs: OperationCosts
    cluster: ClusterSpec
    traits: Traits
    settings: StepSettings
    before: Placement | None = None

    def run(self, show: int | None = None) -> SimulatedStep:
        return simulate_step(
            self.plan, self.workload, self.lengths, self.costs, self.cluster, self.traits,
            before=self.before, settings=self.settings, show=show,
        )  # fmt: skip

    def reference(self, show: int | None = None) -> ReferenceStep:
        return simulate_reference(
            self.plan, self.workload, self.lengths, self.costs, self.cluster, self.traits,
            before=self.before, settings=self.settings, show=show,
        )  # fmt: skip

    def but(self, **changes: Any) -> Case:
        """With other costs, traits or settings; by the names of their fields."""
        mine = {name: value for name, value in changes.items() if name in OperationCosts._fields}
        case = replace(self, costs=self.costs._replace(**mine))
        for part in ("traits", "settings"):
            mine = {name: value for name, value in changes.items() if hasattr(getattr(self, part), name)}
            case = replace(case, **{part: replace(getattr(case, part), **mine)})
        return case

    def free(self, *names: str) -> Case:
        """With some costs 0."""
        return self.but(**dict.fromkeys(names, 0.0))


def free_costs(**costs: Any) -> OperationCosts:
    """All costs are 0 except the given ones; all-to-alls do not slow links down."""
    given: dict[str, Any] = dict.fromkeys(SECONDS, 0.0)
    given |= {"tile_rows": 1, "forwards": False, "dense_backward": 2.0, "expert_backward": 2.0}
    given |= {"near_spare": 1.0, "far_spare": 1.0, "near_share": 1.0, "far_share": 1.0, "reach": 0, "chunked": False}
    given["transfer_tax"] = 0.0
    return OperationCosts(**given | {"top_k": 1} | UNDIVIDED | costs)


def random_costs(rng: np.random.Generator) -> OperationCosts:
    """Seconds of any size, some of them nothing; links from very slow to no wait at all."""
    per = {"token_s": 10, "square_s": 200, "outer_token_s": 10, "outer_square_s": 200, "tile_s": 4, "row_s": 10}
    per |= {"reach_s": 200, "outer_reach_s": 200, "near_row_s": 10, "far_row_s": 10, "hop_row_s": 10}
    costs: dict[str, Any] = {
        name: 0.0 if rng.random() < 0.15 else float(rng.lognormal(0, 1.5)) / per.get(name, 1) for name in SECONDS
    }
    if rng.random() < 0.3:
        costs |= {name: costs[name] * 10 for name in (*WEIGHTS, *GRADIENTS)}
    forwards = bool(rng.integers(2))
    return OperationCosts(
        **costs, **UNDIVIDED, tile_rows=int(rng.choice([1, 2, 5, 128])), forwards=forwards,
        top_k=int(rng.choice([1, 2, 3, 8])) if forwards else 1,
        near_share=float(rng.choice([0.3, 1.0])), far_share=float(rng.choice([0.2, 1.0])),
        reach=int(rng.choice([0, 1, 7, 40])), chunked=bool(rng.integers(2)),
        dense_backward=float(rng.choice([0.5, 2.0, 3.1])), expert_backward=float(rng.choice([0.7, 2.0, 2.9])),
        transfer_tax=float(rng.choice([0.0, 0.15, 0.5])),
        near_spare=float(rng.choice([0.0, 0.1, 0.6, 1.0])), far_spare=float(rng.choice([0.0, 0.1, 0.6, 1.0])),
    )  # fmt: skip


def planning_time(us: float, *, route_us: float = 0.0, exchange: Exchange = FREE, **more: float) -> PlanningTime:
    """The same time per instance, and more of `TimeAtSize`, for any number of ranks."""
    return PlanningTime((TimeAtSize(1, instance=us, **more),), "a test", route_us, exchange)


def random_traits(rng: np.random.Generator) -> Traits:
    """Any combination, also those that no balancer has."""
    copies: Any = rng.choice(["none", "shared slots", "shared slots", "layer slots", "unbounded"])
    known_at: Any = rng.choice(["nothing", "past", "step", "micro-step", "layer"])
    start: Any = rng.choice(["never", "step", "micro-step", "layer"])
    hops: Literal[1, 2] = 1 if rng.random() < 0.7 else 2
    return Traits(
        known_at=str(known_at),  # type: ignore[arg-type]
        planning=planning_time(
            float(rng.choice([0.0, 3e5, 1e6, 1e7])),
            route_us=float(rng.choice([0.0, 1e4])),
            exchange=Exchange(float(rng.choice([0.0, 2e5])), float(rng.choice([0.0, 1e3]))),
            **{name: float(rng.choice([0.0, 3e5, 1e6])) for name in PLANNING_PARTS},
        ),
        transfers_start=str(start),  # type: ignore[arg-type]
        waits_for_weights=bool(rng.random() < 0.3),
        host_path=bool(rng.random() < 0.6),
        hops=hops,
        copies=str(copies),  # type: ignore[arg-type]
        ideal=bool(rng.random() < 0.05),
    )


def random_case(
    rng: np.random.Generator, *, ranks: int, per_node: int, groups: int, layers: int, micro_steps: int, slots: int
) -> Case:
    """Any valid plan of one step, with all else random."""
    experts = ranks * int(rng.integers(1, 4))
    trace = random_trace(
        rng, num_sequences=int(rng.integers(1, 3 * ranks * micro_steps)), max_length=int(rng.choice([3, 20])),
        num_layers=layers, num_experts=experts, top_k=int(rng.integers(1, min(3, experts) + 1)),
        unknown=float(rng.choice([0.0, 0.0, 0.3])),
    )  # fmt: skip
    schedule = Schedule(
        rng.integers(0, micro_steps, trace.num_sequences).astype(np.int32),
        rng.integers(0, ranks, trace.num_sequences).astype(np.int32),
        np.sort(rng.integers(0, int(rng.integers(1, 4)), micro_steps)).astype(np.int32),
        ranks,
    )
    workload = Workload.from_trace(trace, schedule)
    home = random_placement(rng, layers, experts, ranks)
    plan = random_plan(rng, workload, schedule, slots=slots, placement=home, ranks_per_node=per_node)
    plan.check(workload)
    no_links = rng.random() < 0.15
    return Case(
        plan,
        workload,
        trace.sequence_lengths,
        random_costs(rng),
        ClusterSpec(ranks, per_node, slots, node_bytes_per_s=0.0 if no_links else 4e11, planning_threads=3),
        random_traits(rng),
        StepSettings(
            groups, str(rng.choice(["layer", "step"])), int(rng.integers(1, 5)), checkpointing=bool(rng.random() < 0.3)
        ),
        random_placement(rng, layers, experts, ranks) if rng.random() < 0.3 else None,
    )


@st.composite
def cases(draw: st.DrawFn, *, max_groups: int = 3) -> Case:
    """Steps of 1 to 6 ranks on one or several nodes, 1 to 3 groups, 1 to 4 layers and 1 to 5 micro-steps."""
    ranks = draw(st.integers(1, 6))
    return random_case(
        np.random.default_rng(draw(st.integers(0, 2**32))), ranks=ranks,
        per_node=draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0])),
        groups=draw(st.integers(1, max_groups)), layers=draw(st.integers(1, 4)), micro_steps=draw(st.integers(1, 5)),
        slots=draw(st.integers(0, 3)),
    )  # fmt: skip
