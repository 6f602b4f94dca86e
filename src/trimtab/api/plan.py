"""`trimtab.plan`: a plan of one step of a trace, with the balance before and after."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trimtab.api.arguments import ModelSource, Overrides, check_choice, check_optional, check_whole, model_of
from trimtab.api.result_summary import Summarised, Summary
from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, ModelSpec, StepCosts
from trimtab.errors import InputError
from trimtab.planner import Placement, PlanSettings, SequenceCounts, StepPlan, Workload, pack_by_length
from trimtab.planner.plan.bounds import gap_to_bound
from trimtab.planner.plan.prediction import cross_node_rows
from trimtab.planner.replicas.paths import HOST
from trimtab.policies import POLICIES, Policy, View, make_view
from trimtab.policies.trimtab import Trimtab
from trimtab.report.notebook import facts_table
from trimtab.report.number_text import bytes_text, plural, seconds
from trimtab.report.table_data import Facts
from trimtab.report.tables import plan_balance_table
from trimtab.simulator import Balance, expert_time, summarise_balance
from trimtab.trace import RoutingTrace, TraceReader
from trimtab.trace.in_memory import open_trace
from trimtab.trace.store import Source

# Instances whose bound is solved.
SAMPLED = 16


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
        loads_before_MLR: `[M, L, R]` int64 tokens with contiguous homes and no replicas. The policy's plan may have
            another number of micro-steps.
        loads_after_MLR: `[M, L, R]` int64 tokens under the plan.
        balance_before, balance_after: max/mean of these loads.
        expert_time_saved: 1 - (busiest rank's tokens, summed over instances) under the plan / before; negative if the
            plan is worse.
        gap_to_bound: the busiest rank's load divided by a lower bound (`load_bound`) for these homes and slots,
            minus 1; mean of up to 16 instances.
        moves_inside_nodes, moves_between_nodes: experts, summed over layers, whose home differs from the contiguous
            placement: on another rank of the same node, and on another node.
        far_replicas: replicas on another node than the home.
        host_replicas: replicas whose weights come from host memory.
        cross_node_before, cross_node_after: fraction of rows computed on another node than the token's.
        weight_bytes_per_micro_step: bytes of replica weights, all ranks together; None without a model.
        counting_s, planning_s: seconds taken, without numba's compilation.
        mixed_instances: instances with unknown routes.
        unknown_row_fraction: part of all rows without a recorded route, 0 to 1.
    """

    source: str
    trace: RoutingTrace
    policy: str
    cluster: ClusterSpec
    token_budget: int
    plan: StepPlan
    loads_before_MLR: Array
    loads_after_MLR: Array
    balance_before: Balance
    balance_after: Balance
    expert_time_saved: float
    gap_to_bound: float
    moves_inside_nodes: int
    moves_between_nodes: int
    far_replicas: int
    host_replicas: int
    cross_node_before: float
    cross_node_after: float
    weight_bytes_per_micro_step: float | None
    counting_s: float
    planning_s: float
    mixed_instances: int
    unknown_row_fraction: float

    @property
    def title(self) -> str:
        """Trace, step and balancer."""
        return f"{self.source}, step {self.trace.steps[0]}, policy {self.policy}"

    @property
    def num_instances(self) -> int:
        """Micro-steps times layers."""
        return self.plan.num_micro_steps * self.plan.num_layers

    @property
    def us_per_instance(self) -> float:
        """Microseconds of planning for each instance."""
        return self.planning_s / self.num_instances * 1e6

    @property
    def facts(self) -> Facts:
        """Names and values, as `trimtab plan` prints them."""
        trace, cluster, plan = self.trace, self.cluster, self.plan
        rows = [
            ("trace", f"{trace.num_tokens:,} tokens in {trace.num_sequences:,} sequences; {trace.shape_text}"),
            (
                "cluster",
                f"{cluster.ranks} ranks, {cluster.ranks_per_node} per node, {cluster.slots_per_rank} slots per rank",
            ),
            ("schedule", f"{plan.num_micro_steps} micro-steps, each of up to {self.token_budget:,} tokens per rank"),
            ("expert time saved", f"{self.expert_time_saved:.1%} (tokens of the busiest rank, summed over instances)"),
            (
                "gap to the bound",
                f"{self.gap_to_bound:.2%} (busiest rank over a bound for these homes and slots, {SAMPLED} instances)",
            ),
            (
                "replicas",
                f"{plan.num_replicas:,}, {plan.num_replicas / self.num_instances:.2f} per instance, "
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
        chosen = f"{self.strategy}, predicted to take {seconds(predicted[self.strategy])}"
        return [("strategy", chosen), ("other strategies", ", ".join(f"{n} {seconds(predicted[n])}" for n in others))]

    @property
    def strategy(self) -> str:
        """What the plan does, the strategy with the least predicted time; "" if the balancer predicts none."""
        return str(self._settings.get("strategy", ""))

    @property
    def predicted_seconds(self) -> dict[str, float]:
        """Predicted seconds of a step by strategy, the least first; empty if the balancer predicts none."""
        return dict(self._settings.get("predicted_s", {}))

    @property
    def _settings(self) -> dict[str, Any]:
        return dict(json.loads(self.plan.settings)) if self.plan.settings else {}

    def figures(self) -> dict[str, Any]:
        """What `trimtab plan --json` writes."""
        plan = self.plan
        return {
            "schema": "trimtab-plan-1",
            "trace": self.source,
            "step": int(self.trace.steps[0]),
            "policy": self.policy,
            "cluster": asdict(self.cluster),
            "token_budget": self.token_budget,
            "micro_steps": plan.num_micro_steps,
            "max_over_mean_before": asdict(self.balance_before),
            "max_over_mean_after": asdict(self.balance_after),
            "expert_time_saved": self.expert_time_saved,
            "gap_to_bound_mean": self.gap_to_bound,
            "moved_homes": self.moves_inside_nodes + self.moves_between_nodes,
            "far_replicas": self.far_replicas,
            "host_replicas": self.host_replicas,
            "cross_node_token_fraction_before": self.cross_node_before,
            "cross_node_token_fraction": self.cross_node_after,
            "replicas": plan.num_replicas,
            "replicas_per_instance": plan.num_replicas / self.num_instances,
            "weight_bytes_per_micro_step": self.weight_bytes_per_micro_step,
            "strategy": self.strategy,
            "predicted_s": self.predicted_seconds,
            "planning_s": self.planning_s,
            "us_per_instance": self.us_per_instance,
            "mixed_instances": self.mixed_instances,
            "unknown_row_fraction": self.unknown_row_fraction,
            "plan_hash": plan.hash,
        }

    def summary(self) -> Summary:
        before, after = self.balance_before, self.balance_after
        moves = self.moves_inside_nodes + self.moves_between_nodes
        return Summary(
            f"{self.title}, {plural(self.cluster.ranks, 'rank')}",
            (
                f"max/mean of rank loads, mean over instances: {before.mean:.3f} before, {after.mean:.3f} planned; "
                f"expert time saved {self.expert_time_saved:.1%}",
            ),
            (plan_balance_table(before, after), facts_table("Figures of the plan", self.facts)),
            details=(
                f"{plural(self.plan.num_micro_steps, 'micro-step')}, {plural(self.plan.num_replicas, 'replica')}, "
                f"{plural(moves, 'home')} moved",
            ),
        )


def plan(
    trace: RoutingTrace | Source,
    *,
    ranks: int,
    ranks_per_node: int | None = None,
    slots: int = 2,
    token_budget: int = 8192,
    step: int | None = None,
    policy: str = "trimtab",
    max_rows_per_rank: int | None = None,
    exact: bool = False,
    model: ModelSource | None = None,
    overrides: Overrides = (),
) -> PlanResult:
    """Returns a plan of one step of a routing trace for a cluster, as `trimtab plan` does.

    Args:
        trace: a `RoutingTrace`, a path (file, folder or pattern), or a list of paths.
        ranks: ranks of the expert-parallel group.
        ranks_per_node: ranks that share a node; by default all.
        slots: replica slots per rank in every layer.
        token_budget: most tokens of a rank in a micro-step.
        step: RL step to plan; by default the first in the trace.
        policy: the balancer, a name of `trimtab.policies.POLICIES`.
        max_rows_per_rank: rows that no rank may exceed in any layer of a micro-step; with `trimtab` only.
        exact: true: no rank gets more rows of a layer than the mean, rounded up; with `trimtab` only.
        model: to count bytes moved: a `ModelSpec`, a preset's name or hub id, a config.json or a checkpoint; by default
            the model that the trace names, if there is such a preset.
        overrides: keys of the model's config with other values, such as `{"num_hidden_layers": 24}`.

    Raises:
        InputError: one line, if an argument is out of range or the trace can't be read, is empty, has no such step, is
            not of the model, or does not fit the ranks or the token budget.
    """
    check_whole(1, ranks=ranks, token_budget=token_budget)
    check_whole(0, slots=slots)
    check_optional(1, ranks_per_node=ranks_per_node)
    check_optional(0, step=step)
    check_choice("policy", policy, sorted(POLICIES))
    check_optional(1, max_rows_per_rank=max_rows_per_rank)
    balancer = POLICIES[policy]
    if max_rows_per_rank is not None or exact:
        if policy != "trimtab":
            raise InputError(f"max_rows_per_rank and exact are for policy trimtab; the policy is {policy}")
        balancer = Trimtab(PlanSettings(max_rows_per_rank=max_rows_per_rank, exact=exact))
    cluster = ClusterSpec(ranks, ranks_per_node or ranks, slots)
    reader = open_trace(trace)
    chosen = _one_step(reader, step)
    spec = model_of(reader.name, chosen, model, overrides, assume=False)
    homes = Placement.contiguous(chosen.num_layers, chosen.num_experts, cluster.ranks)
    # Untimed, so that compiling is not timed: a few sequences, in several micro-steps.
    few = chosen.part(0, min(chosen.num_sequences, 4 * cluster.ranks))
    budget = min(token_budget, int(few.sequence_lengths.max()))
    _plan(POLICIES[policy], SequenceCounts.from_trace(few), homes, cluster, budget, spec)
    start = time.perf_counter()
    sequences = SequenceCounts.from_trace(chosen)
    counting_ended = time.perf_counter()
    view, made = _plan(balancer, sequences, homes, cluster, token_budget, spec)
    planned = time.perf_counter()
    before, after = Workload.from_sequences(sequences, view.schedule), Workload.from_sequences(sequences, made.schedule)
    made.check(after)
    loads_before, loads_after = before.home_loads(homes.home), made.rank_loads(after)
    inside, between = (int(part.sum()) for part in homes.moves(made.placement, cluster.ranks_per_node))
    rows = max(1, after.num_rows)
    return PlanResult(
        source=reader.name,
        trace=chosen,
        policy=policy,
        cluster=cluster,
        token_budget=token_budget,
        plan=made,
        loads_before_MLR=loads_before,
        loads_after_MLR=loads_after,
        balance_before=summarise_balance(loads_before),
        balance_after=summarise_balance(loads_after),
        expert_time_saved=1 - expert_time(loads_after) / max(1, expert_time(loads_before)),
        gap_to_bound=gap_to_bound(made, after, SAMPLED),
        moves_inside_nodes=inside,
        moves_between_nodes=between,
        far_replicas=int(np.count_nonzero(made.far_replicas)),
        host_replicas=int(np.count_nonzero(made.replica_paths == HOST)),
        cross_node_before=int(cross_node_rows(POLICIES["static"].plan(view), before).sum()) / rows,
        cross_node_after=int(cross_node_rows(made, after).sum()) / rows,
        weight_bytes_per_micro_step=made.num_replicas * spec.expert_bytes / made.num_micro_steps if spec else None,
        counting_s=counting_ended - start,
        planning_s=planned - counting_ended,
        mixed_instances=int(np.count_nonzero(made.mixed_ML)),
        unknown_row_fraction=int(after.unknown_MLR.sum()) / rows,
    )


def _plan(
    policy: Policy,
    sequences: SequenceCounts,
    homes: Placement,
    cluster: ClusterSpec,
    token_budget: int,
    model: ModelSpec | None,
) -> tuple[View, StepPlan]:
    costs = StepCosts.of(cluster, model, moe_layers=sequences.num_layers) if model else None
    schedule = pack_by_length(sequences.lengths, num_ranks=cluster.ranks, token_budget=token_budget)
    view = make_view(policy, sequences, schedule, homes, cluster, token_budget=token_budget, costs=costs)
    return view, policy.plan(view)


def _one_step(reader: TraceReader, step: int | None) -> RoutingTrace:
    if not reader.facts.lengths.any():
        raise InputError(f"{reader.name}: the trace is empty; there is nothing to plan")
    return reader.read(int(reader.facts.steps.min()) if step is None else step)
