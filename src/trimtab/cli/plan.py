"""`trimtab plan`: plan one step of a trace for a cluster, and show the balance before and after."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from trimtab.cli.options import add_trace, check_model, check_outputs, positive, whole, write_json
from trimtab.cluster import ClusterSpec, load_model
from trimtab.errors import InputError
from trimtab.planner import Placement, SequenceCounts, Workload, pack_by_length
from trimtab.planner.bounds import gap_to_bound
from trimtab.planner.paths import HOST
from trimtab.planner.prediction import cross_node_rows
from trimtab.planner.step_plan import StepPlan
from trimtab.policies import POLICIES, Policy, View, look
from trimtab.report.tables import balance_tables, facts
from trimtab.simulator import expert_time, summarise_balance
from trimtab.trace import RoutingTrace, TraceReader

# Instances whose bound is solved.
SAMPLED = 16


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        description="Plan one step of a routing trace for a cluster and print the balance before and after.",
        epilog="example: trimtab plan out/demo/routing/step-00000.parquet --ranks 8 --slots 2",
    )
    add_trace(parser)
    parser.add_argument("--ranks", type=positive, required=True, metavar="N", help="ranks of the expert-parallel group")
    parser.add_argument("--ranks-per-node", type=positive, metavar="N", help="ranks that share a node (default: all)")
    parser.add_argument("--slots", type=whole, default=2, metavar="N", help="replicas a rank has room for (default: 2)")
    parser.add_argument(
        "--token-budget", type=positive, default=8192, metavar="N", help="most tokens a rank and micro-step (8192)"
    )
    parser.add_argument("--step", type=whole, metavar="N", help="RL step to plan (default: the first in the trace)")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="trimtab", help="balancer (default: trimtab)")
    parser.add_argument("--model", metavar="NAME", help="a preset, config.json or checkpoint, to count bytes moved")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="save the plan (.npz)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    check_outputs(options.output, options.json)
    cluster = ClusterSpec(options.ranks, options.ranks_per_node or options.ranks, options.slots)
    reader = TraceReader(options.trace)
    trace = _one_step(reader, options.step)
    model = load_model(options.model) if options.model else None
    if model:
        check_model(reader.name, trace, model)
    policy = POLICIES[options.policy]
    homes = Placement.contiguous(trace.num_layers, trace.num_experts, cluster.ranks)
    few = trace.select(np.arange(min(trace.num_sequences, cluster.ranks)))
    _plan(policy, SequenceCounts.from_trace(few), homes, cluster, options.token_budget)  # compiles
    start = time.perf_counter()
    sequences = SequenceCounts.from_trace(trace)
    counted = time.perf_counter()
    view, plan = _plan(policy, sequences, homes, cluster, options.token_budget)
    planned = time.perf_counter()
    before, after = Workload.from_sequences(sequences, view.schedule), Workload.from_sequences(sequences, plan.schedule)
    plan.check(after)
    loads_before, loads_after = before.home_loads(homes.home), plan.rank_loads(after)
    balance_before, balance_after = summarise_balance(loads_before), summarise_balance(loads_after)
    saved = 1 - expert_time(loads_after) / max(1, expert_time(loads_before))
    instances = plan.num_micro_steps * plan.num_layers
    microseconds = (planned - counted) / instances * 1e6
    gap = gap_to_bound(plan, after, SAMPLED)
    near_moves, far_moves = (int(part.sum()) for part in homes.moves(plan.placement, cluster.ranks_per_node))
    far = int(np.count_nonzero(plan.far_replicas))
    from_host = int(np.count_nonzero(plan.replica_paths == HOST))
    rows_total = max(1, after.num_rows)
    mixed, unknown = int(np.count_nonzero(plan.mixed_ML)), int(after.unknown_MLR.sum()) / rows_total
    crossing = [
        int(cross_node_rows(each, load).sum()) / rows_total
        for each, load in ((POLICIES["static"].plan(view), before), (plan, after))
    ]
    moved = plan.num_replicas * model.expert_bytes / plan.num_micro_steps if model else None
    if options.output:
        plan.save(options.output)
    if options.json:
        write_json(
            options.json,
            {
                "schema": "trimtab-plan-1",
                "trace": reader.name,
                "step": int(trace.steps[0]),
                "policy": options.policy,
                "cluster": asdict(cluster),
                "token_budget": options.token_budget,
                "micro_steps": plan.num_micro_steps,
                "max_over_mean_before": asdict(balance_before),
                "max_over_mean_after": asdict(balance_after),
                "expert_time_saved": saved,
                "gap_to_bound_mean": gap,
                "moved_homes": near_moves + far_moves,
                "far_replicas": far,
                "host_replicas": from_host,
                "cross_node_token_fraction_before": crossing[0],
                "cross_node_token_fraction": crossing[1],
                "replicas": plan.num_replicas,
                "replicas_per_instance": plan.num_replicas / instances,
                "weight_bytes_per_micro_step": moved,
                "planning_s": planned - counted,
                "us_per_instance": microseconds,
                "mixed_instances": mixed,
                "unknown_row_fraction": unknown,
                "plan_hash": plan.hash,
            },
        )
    console = Console(highlight=False)
    rows = [
        ("trace", f"{trace.num_tokens:,} tokens in {trace.num_sequences:,} sequences; {trace.shape_text}"),
        ("cluster", f"{cluster.ranks} ranks, {cluster.ranks_per_node} a node, {cluster.slots_per_rank} slots a rank"),
        ("schedule", f"{plan.num_micro_steps} micro-steps of up to {options.token_budget:,} tokens a rank"),
        ("expert time saved", f"{saved:.1%} (tokens of the busiest rank, summed over instances)"),
        ("gap to the bound", f"{gap:.2%} (busiest rank over the least for these homes and slots, {SAMPLED} instances)"),
        (
            "replicas",
            f"{plan.num_replicas:,}, {plan.num_replicas / instances:.2f} an instance, {far:,} on other nodes, "
            f"{from_host:,} from host memory",
        ),
        ("homes moved", f"{near_moves:,} inside a node, {far_moves:,} to another"),
        ("rows between nodes", f"{crossing[0]:.1%} before, {crossing[1]:.1%} planned"),
        ("counting", f"{counted - start:.3f} s"),
        ("planning", f"{planned - counted:.3f} s, {microseconds:.0f} us an instance"),
        ("plan", plan.hash),
    ]
    if moved is not None:
        rows.insert(6, ("weights moved", f"{moved / 1e6:,.1f} MB a micro-step, all ranks together"))
    if mixed:
        rows.append(
            (
                "unknown routes",
                f"{unknown:.1%} of rows, in {mixed:,} of {instances:,} instances; their experts are estimated",
            )
        )
    console.print(facts(rows, f"{reader.name}, step {trace.steps[0]}, policy {options.policy}"))
    console.print(balance_tables(trace, loads_before, loads_after))


def _plan(
    policy: Policy, sequences: SequenceCounts, homes: Placement, cluster: ClusterSpec, token_budget: int
) -> tuple[View, StepPlan]:
    schedule = pack_by_length(sequences.lengths, num_ranks=cluster.ranks, token_budget=token_budget)
    view = look(policy, sequences, schedule, homes, cluster, token_budget=token_budget)
    return view, policy.plan(view)


def _one_step(reader: TraceReader, step: int | None) -> RoutingTrace:
    if not reader.facts.lengths.any():
        raise InputError(f"{reader.name}: the trace is empty; there is nothing to plan")
    return reader.read(int(reader.facts.steps.min()) if step is None else step)
