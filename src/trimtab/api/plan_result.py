"""`PlanResult`: a plan of one step, its figures, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from trimtab.api.result_summary import Summarised
from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, ModelSpec, StepCosts
from trimtab.figures import by_key, computed, plural
from trimtab.planner import StepPlan, Workload
from trimtab.planner.plan.prediction import cross_node_rows, predict
from trimtab.planner.replicas.paths import HOST
from trimtab.policies import POLICIES
from trimtab.report.imbalance import Imbalance
from trimtab.report.number_text import bytes_text, seconds
from trimtab.report.tables import Facts
from trimtab.simulator import Balance, expert_time, summarise_balance
from trimtab.trace import RoutingTrace


@dataclass(frozen=True, eq=False, repr=False)
class PlanResult(Summarised):
    """A plan of one step, and the balance of rank loads without and with it.

    An instance is one layer of one micro-step: M micro-steps, L layers, R ranks. A row is one token for one of its
    experts. An expert's home is the rank that holds its weights. Balances are max/mean of rank loads, over instances.

    Attributes:
        source: name of the trace's file or files.
        trace: the step's sequences; `plan.schedule` refers to them by index.
        policy: the balancer's name, of `POLICIES`.
        cluster: ranks, nodes and slots of the plan.
        token_budget: most tokens of a rank in a micro-step.
        plan: schedule, placement, replicas and token split; `plan.save(path)` writes it.
        static_plan: contiguous homes and no replicas.
        workload_before, workload_after: load of the step under the schedule of `static_plan`, and under the plan's. The
            plan may have another number of micro-steps.
        model: to count bytes; None if it is not known.
        counting_s: seconds taken by counting, without numba's compilation.
        planning_s: seconds taken by planning, without numba's compilation.
        costs: of a step, to predict seconds; None if the model is not known.
        groups: expert-parallel groups that share out the micro-steps.
    """

    source: str
    trace: RoutingTrace
    policy: str
    cluster: ClusterSpec
    token_budget: int
    plan: StepPlan
    static_plan: StepPlan
    workload_before: Workload
    workload_after: Workload
    model: ModelSpec | None
    counting_s: float
    planning_s: float
    costs: StepCosts | None = None
    groups: int = 1

    @cached_property
    def loads_before_MLR(self) -> Array:
        """`[M, L, R]` int64 tokens with contiguous homes and no replicas."""
        return self.workload_before.home_loads(self.static_plan.home)

    @cached_property
    def loads_after_MLR(self) -> Array:
        """`[M, L, R]` int64 tokens under the plan."""
        return self.plan.rank_loads(self.workload_after)

    @computed(key="micro_steps")
    def num_micro_steps(self) -> int:
        """Micro-steps of the plan."""
        return self.plan.num_micro_steps

    @computed(key="max_over_mean_before")
    def balance_before(self) -> Balance:
        """max/mean of rank loads with contiguous homes and no replicas, over instances."""
        return summarise_balance(self.loads_before_MLR)

    @computed(key="max_over_mean_after")
    def balance_after(self) -> Balance:
        """max/mean of rank loads under the plan, over instances."""
        return summarise_balance(self.loads_after_MLR)

    @computed("fraction", key="expert_time_saved")
    def expert_time_saved(self) -> float:
        """1 - (busiest rank's tokens, summed over instances) under the plan / before; negative if the plan is worse."""
        return 1 - expert_time(self.loads_after_MLR) / max(1, expert_time(self.loads_before_MLR))

    @computed("experts", key="moved_homes")
    def moved_homes(self) -> int:
        """Experts, summed over layers, whose home differs from the contiguous placement."""
        return self.moves_inside_nodes + self.moves_between_nodes

    @computed("experts")
    def moves_inside_nodes(self) -> int:
        """Those of them whose home is on another rank of the same node."""
        return self._moves[0]

    @computed("experts")
    def moves_between_nodes(self) -> int:
        """Those of them whose home is on another node."""
        return self._moves[1]

    @computed("replicas", key="far_replicas")
    def far_replicas(self) -> int:
        """Replicas on another node than the home."""
        return int(np.count_nonzero(self.plan.far_replicas))

    @computed("replicas", key="host_replicas")
    def host_replicas(self) -> int:
        """Replicas whose weights come from host memory."""
        return int(np.count_nonzero(self.plan.replica_paths == HOST))

    @computed("fraction", key="cross_node_token_fraction_before")
    def cross_node_before(self) -> float:
        """Rows that contiguous homes and no replicas would compute on another node than the token's."""
        return int(cross_node_rows(self.static_plan, self.workload_before).sum()) / self._rows

    @computed("fraction", key="cross_node_token_fraction")
    def cross_node_after(self) -> float:
        """Rows that are computed on another node than the token's under the plan."""
        return int(cross_node_rows(self.plan, self.workload_after).sum()) / self._rows

    @computed("replicas", key="replicas")
    def num_replicas(self) -> int:
        """Replicas in all instances."""
        return self.plan.num_replicas

    @computed("replicas", key="replicas_per_instance")
    def replicas_per_instance(self) -> float:
        """Replicas of an instance, mean."""
        return self.plan.num_replicas / self.num_instances

    @computed("bytes", key="weight_bytes_per_micro_step")
    def weight_bytes_per_micro_step(self) -> float | None:
        """Bytes of replica weights of a micro-step, all ranks together; None without a model."""
        return self.plan.num_replicas * self.model.expert_bytes / self.plan.num_micro_steps if self.model else None

    @computed(key="strategy")
    def strategy(self) -> str:
        """What the plan does, the strategy with the least predicted time; "" if the balancer predicts none."""
        return str(self._settings.get("strategy", ""))

    @computed("s", key="predicted_s")
    def predicted_seconds(self) -> dict[str, float]:
        """Predicted time of a step of the whole model by strategy, the least first; empty if the balancer predicts
        none. Several groups share out the micro-steps. Planning for which ranks wait is included."""
        all_layers = self.model.moe_layers if self.model else self.plan.num_layers
        layers = all_layers / self.plan.num_layers
        share = -(-self.num_micro_steps // self.groups) / self.num_micro_steps
        once_s = self._seconds_once
        predicted = self._settings.get("predicted_s", {})
        planning = POLICIES[self.policy].traits.hidden_planning(
            self.plan, self.workload_after, self.trace.sequence_lengths, self.cluster, all_layers
        )
        planning_s = planning.header_s + planning.round_s
        return {name: planning_s + layers * (once_s + share * (step_s - once_s)) for name, step_s in predicted.items()}

    @property
    def _seconds_once(self) -> float:
        """What a step takes however many groups share its micro-steps out: the optimizer, sums of gradients that no
        backward hides, and moves."""
        if self.costs is None or self.groups == 1:
            return 0.0
        lengths = [self.trace.sequence_lengths]
        before_LE = self.static_plan.home
        parts_s = predict([self.plan], [self.workload_after], self.costs, lengths=lengths, before_LE=before_LE).parts_s
        return parts_s["optimizer"] + parts_s["migration"]

    @computed("us", key="us_per_instance")
    def us_per_instance(self) -> float:
        """Planning time of each instance."""
        return self.planning_s / self.num_instances * 1e6

    @computed("instances", key="mixed_instances")
    def mixed_instances(self) -> int:
        """Instances with unknown routes."""
        return int(np.count_nonzero(self.plan.mixed_ML))

    @computed("fraction", key="unknown_row_fraction")
    def unknown_row_fraction(self) -> float:
        """Part of all rows without a recorded route, 0 to 1."""
        return int(self.workload_after.unknown_MLR.sum()) / self._rows

    @computed(key="plan_hash")
    def plan_hash(self) -> str:
        """Hash of the plan, the same on every machine."""
        return self.plan.hash

    @cached_property
    def _moves(self) -> tuple[int, int]:
        """Experts that move within a node, and to another one."""
        moves = self.static_plan.placement.moves(self.plan.placement, self.cluster.ranks_per_node)
        return int(moves[0].sum()), int(moves[1].sum())

    @property
    def _rows(self) -> int:
        return max(1, self.workload_after.num_rows)

    @property
    def title(self) -> str:
        """Trace, step and balancer."""
        return f"{self.source}, step {self.trace.steps[0]}, policy {self.policy}"

    @property
    def num_instances(self) -> int:
        """Micro-steps times layers."""
        return self.plan.num_micro_steps * self.plan.num_layers

    @property
    def facts(self) -> Facts:
        """Names and values, as `trimtab plan` prints them."""
        trace, cluster, plan = self.trace, self.cluster, self.plan
        rows = [
            *(("note", note) for note in trace.notes),
            (
                "trace",
                f"{plural(trace.num_tokens, 'token')} in {plural(trace.num_sequences, 'sequence')}; {trace.shape_text}",
            ),
            (
                "cluster",
                f"{plural(cluster.ranks, 'rank')}, {cluster.ranks_per_node} per node, "
                f"{plural(cluster.slots_per_rank, 'slot')} per rank",
            ),
            (
                "schedule",
                f"{plural(plan.num_micro_steps, 'micro-step')}, each of up to {self.token_budget:,} tokens per rank",
            ),
            ("expert time saved", f"{self.expert_time_saved:.1%} (tokens of the busiest rank, summed over instances)"),
            (
                "replicas",
                f"{self.num_replicas:,}, {self.replicas_per_instance:.2f} per instance, "
                f"{self.far_replicas:,} on other nodes, {self.host_replicas:,} from host memory",
            ),
            *self._strategy_facts(),
            ("homes moved", f"{self.moves_inside_nodes:,} within a node, {self.moves_between_nodes:,} to another node"),
            ("rows between nodes", f"{self.cross_node_before:.1%} before, {self.cross_node_after:.1%} planned"),
            ("counting", seconds(self.counting_s)),
            ("planning", f"{seconds(self.planning_s)}, {seconds(self.planning_s / self.num_instances)} per instance"),
            ("plan", plan.hash),
        ]
        moved = self.weight_bytes_per_micro_step
        if moved is not None:
            rows.insert(6, ("weights moved", f"{bytes_text(moved)} per micro-step, all ranks together"))
        if self.mixed_instances:
            rows.append(
                (
                    "unknown routes",
                    f"{self.unknown_row_fraction:.1%} of rows, in {self.mixed_instances:,} of {self.num_instances:,} "
                    "instances; their experts are estimated",
                )
            )
        return rows

    def _strategy_facts(self) -> list[tuple[str, str]]:
        """The chosen strategy and the others, the fastest first; nothing for balancers that don't predict time."""
        predicted = self.predicted_seconds
        if not predicted:
            return []
        others = [name for name in predicted if name != self.strategy]
        best = f"{self.strategy}, predicted to take {seconds(predicted[self.strategy])}"
        return [("strategy", best), ("other strategies", ", ".join(f"{n} {seconds(predicted[n])}" for n in others))]

    @property
    def _settings(self) -> dict[str, Any]:
        return dict(json.loads(self.plan.settings)) if self.plan.settings else {}

    def figures(self) -> dict[str, Any]:
        """What `trimtab plan --json` writes.

        trace: its files.
        step: RL step.
        cluster: ranks, nodes and slots; rates are those of the default.
        token_budget: most tokens of a rank in a micro-step.
        planning_s: seconds of planning, without counting and compilation.
        """
        figures = {
            "schema": "trimtab-plan-2",
            "trace": self.source,
            "step": int(self.trace.steps[0]),
            "policy": self.policy,
            "cluster": self.cluster,
            "token_budget": self.token_budget,
            **by_key(self),
            "planning_s": self.planning_s,
        }
        return {
            key: asdict(value) if isinstance(value, ClusterSpec | Balance) else value for key, value in figures.items()
        }

    @property
    def imbalance(self) -> Imbalance:
        loads = {"static": self.loads_before_MLR, self.policy: self.loads_after_MLR}
        return Imbalance(loads, self.trace.layer_indices, int(self.trace.steps[0]), self.trace.top_k)

    def summary(self) -> Sequence[str]:
        before, after = self.balance_before, self.balance_after
        return (
            f"{self.title}, {plural(self.cluster.ranks, 'rank')}",
            f"max/mean of rank loads, mean over instances: {before.mean:.3f} before, {after.mean:.3f} planned; "
            f"expert time saved {self.expert_time_saved:.1%}",
            f"{plural(self.plan.num_micro_steps, 'micro-step')}, {plural(self.plan.num_replicas, 'replica')}, "
            f"{plural(self.moved_homes, 'home')} moved",
        )
