"""`trimtab plan`: plan one step of a trace for a cluster, and show the balance before and after."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from trimtab.cli.options import positive, whole, write_json
from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.errors import InputError
from trimtab.planner import Placement, SequenceCounts, Workload, pack_by_length
from trimtab.policies import POLICIES, look
from trimtab.report.tables import balance_tables, facts
from trimtab.simulator import expert_time, summarise_balance
from trimtab.trace import RoutingTrace, read_trace


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="plan a step of a trace for a cluster",
        description="Plan one step of a routing trace for a cluster and print the balance before and after.",
        epilog="example: trimtab plan out/demo/routing/step-00000.parquet --ranks 8 --slots 2",
    )
    parser.add_argument("trace", type=Path, metavar="FILE", help="a routing trace (.parquet)")
    parser.add_argument("--ranks", type=positive, required=True, metavar="N", help="ranks of the expert-parallel group")
    parser.add_argument("--ranks-per-node", type=positive, metavar="N", help="ranks that share a node (default: all)")
    parser.add_argument("--slots", type=whole, default=2, metavar="N", help="replicas a rank has room for (default: 2)")
    parser.add_argument(
        "--token-budget", type=positive, default=8192, metavar="N", help="most tokens a rank and micro-step (8192)"
    )
    parser.add_argument("--step", type=whole, metavar="N", help="RL step to plan (default: the first in the trace)")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="trimtab", help="balancer (default: trimtab)")
    parser.add_argument("--model", type=Path, metavar="PATH", help="config.json or checkpoint, to count bytes moved")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="save the plan (.npz)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    cluster = ClusterSpec(options.ranks, options.ranks_per_node or options.ranks, options.slots)
    trace = _one_step(read_trace(options.trace), options.step, options.trace)
    model = _model(options.model, trace, options.trace)
    schedule = pack_by_length(trace.sequence_lengths, num_ranks=cluster.ranks, token_budget=options.token_budget)
    policy = POLICIES[options.policy]
    placement = Placement.contiguous(trace.num_layers, trace.num_experts, cluster.ranks)
    start = time.perf_counter()
    sequences = SequenceCounts.from_trace(trace)
    workload = Workload.from_sequences(sequences, schedule)
    counted = time.perf_counter()
    plan = policy.plan(look(policy, sequences, schedule, placement, cluster, token_budget=options.token_budget))
    planned = time.perf_counter()
    plan.check(workload)
    loads_before, loads_after = workload.home_loads(plan.home), plan.rank_loads(workload)
    before, after = summarise_balance(loads_before), summarise_balance(loads_after)
    saved = 1 - expert_time(loads_after) / max(1, expert_time(loads_before))
    instances = plan.num_micro_steps * plan.num_layers
    microseconds = (planned - counted) / instances * 1e6
    moved = plan.num_replicas * model.expert_bytes / plan.num_micro_steps if model else None
    console = Console(highlight=False)
    rows = [
        ("trace", f"{trace.num_tokens:,} tokens in {trace.num_sequences:,} sequences; {trace.shape_text}"),
        ("cluster", f"{cluster.ranks} ranks, {cluster.ranks_per_node} a node, {cluster.slots_per_rank} slots a rank"),
        ("schedule", f"{plan.num_micro_steps} micro-steps of up to {options.token_budget:,} tokens a rank"),
        ("expert time saved", f"{saved:.1%} (tokens of the busiest rank, summed over instances)"),
        ("replicas", f"{plan.num_replicas:,}, {plan.num_replicas / instances:.2f} an instance"),
        ("counting", f"{counted - start:.3f} s"),
        ("planning", f"{planned - counted:.3f} s, {microseconds:.0f} us an instance"),
        ("plan", plan.hash),
    ]
    if moved is not None:
        rows.insert(5, ("weights moved", f"{moved / 1e6:,.1f} MB a micro-step, all ranks together"))
    if not plan.plannable.all():
        rows.append(("unplanned", f"{np.count_nonzero(~plan.plannable)} micro-steps, since routes are missing"))
    console.print(facts(rows, f"{options.trace}, step {trace.steps[0]}, policy {options.policy}"))
    console.print(balance_tables(trace, workload, plan, before, after))
    if options.output:
        plan.save(options.output)
    if options.json:
        write_json(
            options.json,
            {
                "schema": "trimtab-plan-1",
                "trace": str(options.trace),
                "step": int(trace.steps[0]),
                "policy": options.policy,
                "cluster": asdict(cluster),
                "token_budget": options.token_budget,
                "micro_steps": plan.num_micro_steps,
                "max_over_mean_before": asdict(before),
                "max_over_mean_after": asdict(after),
                "expert_time_saved": saved,
                "replicas": plan.num_replicas,
                "replicas_per_instance": plan.num_replicas / instances,
                "weight_bytes_per_micro_step": moved,
                "planning_s": planned - counted,
                "us_per_instance": microseconds,
                "unplanned_micro_steps": int(np.count_nonzero(~plan.plannable)),
                "plan_hash": plan.hash,
            },
        )


def _one_step(trace: RoutingTrace, step: int | None, path: Path) -> RoutingTrace:
    if not trace.num_tokens:
        raise InputError(f"{path}: the trace is empty; there is nothing to plan")
    steps = np.unique(trace.steps)
    chosen = int(steps[0]) if step is None else step
    if chosen not in steps:
        raise InputError(f"{path}: no step {chosen}; it has steps {steps[0]} to {steps[-1]}")
    return trace.select(np.flatnonzero(trace.steps == chosen))


def _model(path: Path | None, trace: RoutingTrace, trace_path: Path) -> ModelSpec | None:
    if path is None:
        return None
    model = ModelSpec.from_config(path)
    if (model.num_experts, model.top_k) != (trace.num_experts, trace.top_k):
        raise InputError(
            f"{trace_path} is not of model {path}: the trace has {trace.num_experts} experts, top-{trace.top_k}, "
            f"the model {model.num_experts} experts, top-{model.top_k}"
        )
    return model
