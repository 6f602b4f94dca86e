"""Texts and values of a simulated step: answer, setting, results of balancers, and the page."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trimtab.report.model import LoadMap, PolicyResult, Report, Timeline
from trimtab.report.table_data import Facts
from trimtab.simulator.comparison import ComparisonCase, Outcome, operations
from trimtab.simulator.recorded_operations import KINDS
from trimtab.trace import RoutingTrace

ABOUT = {
    "nothing": "uses no routing; no replicas",
    "past": "plans from past steps",
    "step": "plans from the step's routing",
    "micro-step": "plans from each micro-step's routing",
    "layer": "plans in each layer, after its router",
}


def simulation_report(
    source: str, trace: RoutingTrace, case: ComparisonCase, outcomes: Mapping[str, Outcome]
) -> Report:
    """The page of one case. `outcomes` has `static` and `balanced`."""
    best = _best(outcomes)
    return Report(
        title=f"Expert load of {case.model.name} on {case.cluster.ranks} ranks",
        answer=answer(case, outcomes),
        facts=setting_facts(source, trace, case, outcomes),
        policies=policy_results(outcomes),
        layer_names=tuple(str(index) for index in trace.layer_indices),
        before=LoadMap("static", outcomes["static"].simulated.work.loads_MLR),
        after=LoadMap(best, outcomes[best].simulated.work.loads_MLR),
        timelines=timelines(case, outcomes),
        notes=notes(trace, case),
    )


def setting_facts(source: str, trace: RoutingTrace, case: ComparisonCase, outcomes: Mapping[str, Outcome]) -> Facts:
    """Trace, model, cluster and options."""
    cluster = case.cluster
    micro_steps = outcomes["static"].plan.num_micro_steps
    return (
        ("trace", f"{source}, step {trace.steps[0]}: {trace.num_tokens:,} tokens, {trace.num_sequences:,} sequences"),
        ("model", f"{case.model.name}; the trace has {trace.shape_text}"),
        ("cluster", f"{cluster.ranks} ranks, {cluster.ranks_per_node} per node, {cluster.name}"),
        ("slots", f"{cluster.slots_per_rank} replicas per rank"),
        ("micro-steps", f"{micro_steps}, each of up to {case.token_budget:,} tokens per rank"),
        ("optimizer steps", f"{case.mini_batches}"),
        ("expert-parallel groups", f"{case.settings.groups}"),
        ("terms", "equal: same homes, schedule and slots" if case.equal_terms else "own recipe of each policy"),
    )


def answer(case: ComparisonCase, outcomes: Mapping[str, Outcome]) -> str:
    """The result in one sentence."""
    best = _best(outcomes)
    static_s = outcomes["static"].simulated.step_time_s
    ideal, gained = (static_s / outcomes[name].simulated.step_time_s for name in ("balanced", best))
    where = f"on {case.cluster.ranks} {case.cluster.name} ranks"
    if best == "static":
        return f"Imbalance costs {1 - 1 / ideal:.0%} of each step {where}; none of these balancers reduces it."
    return (
        f"Imbalance costs {1 - 1 / ideal:.0%} of each step {where}; {best} makes the step {gained:.2f} times as fast "
        f"as static. Perfectly even routing would make it {ideal:.2f} times as fast."
    )


def notes(trace: RoutingTrace, case: ComparisonCase) -> tuple[str, ...]:
    """Assumptions and limits of the figures."""
    layers, all_layers = trace.num_layers, case.model.moe_layers
    texts = ["Step time is recompute and update, predicted by a timeline model of the cluster, without the rollout."]
    if layers != all_layers:
        texts.append(
            f"The trace has {layers} of the model's {all_layers} MoE layers; everything else is scaled in proportion."
        )
    if not case.earlier:
        texts.append(
            "The trace has no earlier step: balancers that use past loads have none, and all homes move at once."
        )
    unknown = int(case.sequences.unknown_SL.sum(dtype=np.int64))
    if unknown:
        rows = trace.num_tokens * trace.top_k * layers
        texts.append(
            f"The experts of {unknown / rows:.1%} of rows are not recorded; the figures include estimates for them."
        )
    return tuple(texts)


def policy_results(outcomes: Mapping[str, Outcome]) -> tuple[PolicyResult, ...]:
    """Figures of each balancer. `outcomes` has `static` and `balanced`."""
    static_s, balanced_s = (outcomes[name].simulated.step_time_s for name in ("static", "balanced"))
    return tuple(
        PolicyResult(
            name=outcome.name,
            about=_about(outcome),
            step_time_s=outcome.simulated.step_time_s,
            speedup=static_s / outcome.simulated.step_time_s,
            fraction_of_balanced=balanced_s / outcome.simulated.step_time_s,
            max_over_mean=outcome.balance.mean,
            parts_s=_bars(outcome.simulated.parts_s),
            memory_bytes={name: float(value) for name, value in outcome.memory.items()},
            replicas_per_instance=outcome.plan.num_replicas / (outcome.plan.num_micro_steps * outcome.plan.num_layers),
            max_over_mean_p99=outcome.balance.p99,
            cross_node_fraction=outcome.cross_node_fraction,
        )
        for outcome in outcomes.values()
    )


def _about(outcome: Outcome) -> str:
    return "perfectly even routing" if outcome.policy.traits.ideal else ABOUT[outcome.policy.traits.known_at]


def _bars(parts_s: Mapping[str, float]) -> dict[str, float]:
    """Non-negative parts: the last rank may have less compute than the mean if it is late for other reasons."""
    below = min(0.0, parts_s["imbalance"])
    return dict(parts_s) | {"experts": parts_s["experts"] + below, "imbalance": parts_s["imbalance"] - below}


def timelines(case: ComparisonCase, outcomes: Mapping[str, Outcome]) -> tuple[Timeline, ...]:
    """The middle micro-step of the balancer shown on the page, and of `static`."""
    names = dict.fromkeys((_best(outcomes), "static"))
    return tuple(_timeline(case, outcomes[name]) for name in names)


def _timeline(case: ComparisonCase, outcome: Outcome) -> Timeline:
    micro_step = outcome.plan.num_micro_steps // 2
    events = operations(case, outcome, micro_step)
    return Timeline(
        title=f"{outcome.name}, update of micro-step {micro_step}",
        names=KINDS,
        kind_N=events.kind_N,
        lane_N=events.lane_N,
        rank_N=events.rank_N,
        layer_N=events.layer_N,
        start_N=np.ascontiguousarray(events.spans_N2[:, 0]),
        end_N=np.ascontiguousarray(events.spans_N2[:, 1]),
    )


def _best(outcomes: Mapping[str, Outcome]) -> str:
    """`trimtab` if it ran, else the fastest except the ideal."""
    if "trimtab" in outcomes:
        return "trimtab"
    real = [outcome for outcome in outcomes.values() if not outcome.policy.traits.ideal]
    return min(real, key=lambda outcome: outcome.simulated.step_time_s).name
