"""What a training run can do about imbalance, the simplest first, and each as a balancer of the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from trimtab.planner.placement.expert_order import order_experts
from trimtab.policies import POLICIES, Eplb, Policy
from trimtab.policies.live import LiveCounts, LivePrediction
from trimtab.policies.trimtab import Trimtab
from trimtab.simulator.comparison import Outcome, simulate_policy
from trimtab.simulator.comparison_case import ComparisonCase

RECORDED = "recorded routing"
VERL = "verl: +actor_rollout_ref.actor.megatron.override_mcore_model_config.trimtab."
OTHERS = "slime, miles, ROLL, NeMo-RL, SkyRL, ms-swift: TRIMTAB_BALANCE="
OWN_LOOP = "own loop: Session.plan_sequences"
IN_RUN = "own loop, Megatron: session.renumber() between steps"
RENUMBER = "trimtab renumber MODEL --trace TRACE -o NEW"


@dataclass(frozen=True)
class RunStrategy:
    """One thing to do.

    Attributes:
        name: in tables.
        about: what it does.
        needs: what a run needs for it; "" for nothing.
        settings: lines to copy.
        has_slots: whether ranks hold replicas.
        needs_past: whether it needs steps before.
        renumbers: whether the checkpoint's experts are in the order of past loads.
    """

    name: str
    about: str
    needs: str
    settings: tuple[str, ...]
    make: Callable[[], Policy]
    has_slots: bool = False
    needs_past: bool = False
    renumbers: bool = False

    def simulate(self, case: ComparisonCase) -> Outcome:
        """Plan and simulate the steps of a case with it."""
        case = renumbered(case) if self.renumbers else case
        return simulate_policy(case if self.has_slots else case.with_slots(0), self.name, self.make())


def renumbered(case: ComparisonCase) -> ComparisonCase:
    """The case of a checkpoint that `order_experts` gave another order, by the loads of the steps before those that are
    measured, or of the first one. Halves have orders of their own prompts."""
    past = case.earlier[: max(1, len(case.steps) - case.measured)]
    past_PLE = np.stack([step.counts_SLE.sum(axis=0, dtype=np.int64) for step in past])
    cluster = case.cluster
    order_LE = order_experts(past_PLE, cluster.ranks, cluster.ranks_per_node, case.model.expert_groups)
    return replace(case.permuted(order_LE), halves=tuple(map(renumbered, case.halves)))


def _plugins(mode: str) -> tuple[str, ...]:
    return f"{VERL}mode={mode}", f"{OTHERS}mode={mode}"


NOTHING = RunStrategy("nothing", "contiguous homes, sequences packed by length", "", (), lambda: POLICIES["static"])
ALL = RunStrategy(
    "all", "sequences, homes and replicas, whatever pays", f"{RECORDED} and memory for replicas",
    (OWN_LOOP, IN_RUN), lambda: POLICIES["trimtab"], has_slots=True,
)  # fmt: skip
REPLICAS = RunStrategy(
    "replicas", "replicas planned before each micro-step", f"{RECORDED} and memory for replicas", _plugins("plan"),
    lambda: Trimtab(may_move=False), has_slots=True,
)  # fmt: skip
EPLB = RunStrategy(
    "eplb", "copies of hot experts, placed by past loads", "copies in every layer's memory",
    (), Eplb, has_slots=True, needs_past=True,
)  # fmt: skip
STRATEGIES = (
    NOTHING,
    RunStrategy(
        "pack by time", "sequences packed by predicted time, not by length", "your own batches",
        (OWN_LOOP,), lambda: POLICIES["scheduled"],
    ),
    RunStrategy(
        "renumber", "a checkpoint with experts in another order, by past loads", "routing of a run before", (RENUMBER,),
        lambda: POLICIES["static"], needs_past=True, renumbers=True,
    ),
    RunStrategy(
        "pack by routing", "sequences grouped by their experts' ranks", f"{RECORDED} and your own batches",
        (OWN_LOOP,), lambda: Trimtab(may_move=False),
    ),
    RunStrategy(
        "homes each step", "experts get other ranks between steps", RECORDED, (IN_RUN,), Trimtab,
    ),
    EPLB,
    RunStrategy(
        "live by counts", "replicas chosen in each layer after its router", "memory for replicas", _plugins("live"),
        LiveCounts, has_slots=True,
    ),
    RunStrategy(
        "live by prediction", "replicas chosen from earlier micro-steps", "memory for replicas", _plugins("live"),
        LivePrediction, has_slots=True, needs_past=True,
    ),
    REPLICAS,
    RunStrategy(
        "renumber, replicas", "planned replicas, in a renumbered checkpoint", f"{RECORDED} and memory for replicas",
        (RENUMBER, *_plugins("plan")), lambda: Trimtab(may_move=False), has_slots=True, needs_past=True, renumbers=True,
    ),
    ALL,
)  # fmt: skip
"""The simplest first: of strategies that are about as fast, the first is recommended."""
