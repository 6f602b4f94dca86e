"""Content of a report from simulated steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trimtab.report.model import LoadMap, PolicyResult, Report, Timeline
from trimtab.simulator.comparison import ComparisonCase, Outcome, operations
from trimtab.simulator.recorded_operations import KINDS
from trimtab.trace import RoutingTrace

KNOWN = {
    "past": "earlier routing",
    "step": "the whole step, beforehand",
    "micro-step": "each micro-step, beforehand",
    "layer": "each layer, after its router",
}


def simulation_report(
    source: str, trace: RoutingTrace, situation: ComparisonCase, outcomes: Mapping[str, Outcome]
) -> Report:
    """The page of one case. `outcomes` has `static` and `balanced`."""
    best = _best(outcomes)
    cluster, model = situation.cluster, situation.model
    return Report(
        title=f"Expert load of {model.name} on {cluster.ranks} ranks",
        answer=answer(situation, outcomes),
        facts=(
            (
                "trace",
                f"{source}, step {trace.steps[0]}: {trace.num_tokens:,} tokens, {trace.num_sequences:,} sequences",
            ),
            ("model", f"{model.name}; {trace.shape_text}"),
            ("cluster", f"{cluster.ranks} ranks, {cluster.ranks_per_node} a node, of kind {cluster.name}"),
            ("slots", f"{cluster.slots_per_rank} replicas a rank"),
            (
                "micro-steps",
                f"{outcomes['static'].plan.num_micro_steps} of up to {situation.token_budget:,} tokens a rank",
            ),
            ("optimizer steps", f"{situation.mini_batches}"),
            ("expert-parallel groups", f"{situation.settings.groups}"),
            ("terms", "equal: same homes, schedule and slots" if situation.equal_terms else "each on its own recipe"),
        ),
        policies=tuple(policy_result(outcome, outcomes) for outcome in outcomes.values()),
        layer_names=tuple(str(index) for index in trace.layer_indices),
        before=LoadMap("static", outcomes["static"].simulated.work.loads_MLR),
        after=LoadMap(best, outcomes[best].simulated.work.loads_MLR),
        timelines=timelines(situation, outcomes),
        notes=notes(trace, situation),
    )


def answer(situation: ComparisonCase, outcomes: Mapping[str, Outcome]) -> str:
    """Returns the result in one sentence."""
    best = _best(outcomes)
    static_s = outcomes["static"].simulated.step_time_s
    ideal, gained = (static_s / outcomes[name].simulated.step_time_s for name in ("balanced", best))
    where = f"on {situation.cluster.ranks} {situation.cluster.name} ranks"
    if best == "static":
        return f"Imbalance costs {1 - 1 / ideal:.0%} of each step {where}; none of these balancers reduces it."
    return (
        f"Imbalance costs {1 - 1 / ideal:.0%} of each step {where}; {best} makes the step {gained:.2f} times as fast, "
        f"{gained / ideal:.0%} of what perfect balance would give."
    )


def notes(trace: RoutingTrace, situation: ComparisonCase) -> tuple[str, ...]:
    """Assumptions and limits of the figures."""
    layers, all_layers = trace.num_layers, situation.model.moe_layers
    texts = ["Step time is recompute and update, predicted by a timeline model of the cluster, without the rollout."]
    if layers != all_layers:
        texts.append(
            f"The trace has {layers} of the model's {all_layers} MoE layers; everything else is scaled in proportion."
        )
    if not situation.earlier:
        texts.append(
            "The trace has no earlier step: balancers that use past loads have none, and all homes move at once."
        )
    unknown = int(situation.sequences.unknown_SL.sum(dtype=np.int64))
    if unknown:
        rows = trace.num_tokens * trace.top_k * layers
        texts.append(
            f"The experts of {unknown / rows:.1%} of rows are not recorded; the figures include estimates for them."
        )
    return tuple(texts)


def policy_result(outcome: Outcome, outcomes: Mapping[str, Outcome]) -> PolicyResult:
    """A balancer's row."""
    seconds = outcome.simulated.step_time_s
    instances = outcome.plan.num_micro_steps * outcome.plan.num_layers
    return PolicyResult(
        name=outcome.name,
        about="the ideal" if outcome.policy.traits.ideal else f"knows {KNOWN[outcome.policy.traits.known_at]}",
        step_time_s=seconds,
        speedup=outcomes["static"].simulated.step_time_s / seconds,
        fraction_of_balanced=outcomes["balanced"].simulated.step_time_s / seconds,
        max_over_mean=outcome.balance.mean,
        parts_s=_bars(outcome.simulated.parts_s),
        memory_bytes={name: float(value) for name, value in outcome.memory.items()},
        replicas_per_instance=outcome.plan.num_replicas / instances,
    )


def _bars(parts_s: Mapping[str, float]) -> dict[str, float]:
    """Non-negative parts: the last rank may have less compute than the mean if it is late for other reasons."""
    below = min(0.0, parts_s["imbalance"])
    return dict(parts_s) | {"experts": parts_s["experts"] + below, "imbalance": parts_s["imbalance"] - below}


def timelines(situation: ComparisonCase, outcomes: Mapping[str, Outcome]) -> tuple[Timeline, ...]:
    """The middle micro-step of the balancer shown on the page, and of `static`."""
    names = dict.fromkeys((_best(outcomes), "static"))
    return tuple(_timeline(situation, outcomes[name]) for name in names)


def _timeline(situation: ComparisonCase, outcome: Outcome) -> Timeline:
    micro_step = outcome.plan.num_micro_steps // 2
    events = operations(situation, outcome, micro_step)
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
