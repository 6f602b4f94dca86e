"""Sentences that summarise an analysis: cost of imbalance, its layers, and whether known routing helps."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.analysis.analysis import Analysis, worst_layers
from trimtab.analysis.fixed_placements import SLOTS
from trimtab.analysis.hot_experts import HOT_FACTOR
from trimtab.figures import plural
from trimtab.planner import PlanSettings
from trimtab.simulator.resampling import LEAST_SEQUENCES

# Below this part of expert time lost, balancing is not worth it.
NEGLIGIBLE_LOSS = 0.03
# Above this part of unknown routes, it stands beside the first figure.
LARGE_UNKNOWN = 0.05
# Differences below this part are reported as none.
NEGLIGIBLE_GAIN = 0.02


def assumed(analyses: Sequence[Analysis]) -> str:
    """Returns what was assumed for figures in seconds; "" if nothing was."""
    texts = [text for analysis in analyses if analysis.estimate for text in analysis.estimate.assumed]
    return " ".join(dict.fromkeys(texts))


def answer(analysis: Analysis) -> str:
    """Returns the answer in a few sentences."""
    ratio, lost = analysis.total.max_over_mean.mean, analysis.total.lost
    if analysis.ranks == 1:
        return "One rank computes all experts, so there is nothing to balance; try --ranks."
    counts = analysis.counts
    unknown = unknown_text(counts.unknown_routes / max(1, counts.num_tokens * counts.num_layers))
    opening = (
        f"On {analysis.ranks} ranks the busiest computes {ratio:.2f} times the mean{unknown}, and on average a rank is "
        f"idle for {lost:.0%} of expert time ({analysis.permuted.expert_time_lost:.0%} with permuted expert ids)"
    )
    if lost < NEGLIGIBLE_LOSS:
        return f"{opening}: there is almost nothing to gain."
    if analysis.counts.num_micro_steps == 1:
        return (
            f"{opening}. All tokens fit one micro-step, so this trace does not show whether the load changes between "
            "micro-steps."
        )
    return f"{opening}. {_placement_answer(analysis)}"


def unknown_text(part: float) -> str:
    """The part of the routes that is unknown, to stand beside a figure; "" if it is small."""
    return f" ({part:.0%} of the routes are not recorded)" if part > LARGE_UNKNOWN else ""


def _placement_answer(analysis: Analysis) -> str:
    found = analysis.placements
    past, step = found.best("past"), found.best("step")
    if past is None or step is None or step.recovered_fraction is None or past.recovered_fraction is None:
        return "This trace does not show which placement would help."
    last = "the step before" if found.history == "step" else "the first half of the step"
    # A placement by the step's own loads may by chance be worse than one by the step before.
    best = min(step, past, key=lambda strategy: strategy.expert_time_lost)
    recovered = best.recovered_fraction or 0.0
    if recovered - past.recovered_fraction < 2 * NEGLIGIBLE_GAIN:
        best = past
        fixed = f"A placement based on {last} would recover {_percent(past.recovered_fraction)} of that"
    else:
        fixed = (
            f"A fixed placement would recover {_percent(recovered)} of that if based on the step itself, and "
            f"{_percent(past.recovered_fraction)} if based on {last}"
        )
    if past.expert_time_lost < NEGLIGIBLE_LOSS:
        return f"{fixed}, so a balancer that uses past loads is enough."
    if best.expert_time_lost < NEGLIGIBLE_LOSS:
        return f"{fixed}, so known routing helps, and one plan per step is nearly enough."
    remaining = f"{best.expert_time_lost:.0%} of expert time would still be lost"
    if step.expert_time_lost_whole_step > best.expert_time_lost / 2:
        return f"{fixed}; {remaining}, since some experts are too hot for {SLOTS} replicas per rank in equal shares."
    plan = found.best("micro-step")
    verdict = f" A plan for each micro-step leaves {plan.expert_time_lost:.1%}." if plan else ""
    return f"{fixed}; {remaining}, since loads change from micro-step to micro-step.{verdict}"


def _percent(part: float) -> str:
    return f"{part:.0%}" if part >= NEGLIGIBLE_GAIN else "nothing"


def layers_summary(analysis: Analysis) -> str:
    """Returns a sentence on the layers that lose most time; "" with little loss or one layer."""
    layers = len(analysis.layers)
    if layers < 2 or analysis.total.lost < NEGLIGIBLE_LOSS:
        return ""
    worst = worst_layers(analysis)[: max(1, layers // 4)]
    share = analysis.lost_share_L[worst].sum()
    names = ", ".join(str(analysis.counts.layer_indices[layer]) for layer in worst[:3])
    if len(worst) == 1:
        return (
            f"Layer {names} loses most of all: {share:.0%} of the lost time ({1 / layers:.0%} would be its even share)."
        )
    even = len(worst) / layers
    spread = "All layers lose about the same" if share < 1.25 * even else "Some layers lose more than others"
    return f"{spread}: the worst quarter ({names}{', ...' if len(worst) > 3 else ''}) has {share:.0%} of the lost time."


def cost_summary(analysis: Analysis) -> str:
    """Returns the cost in seconds as a sentence; "" without an estimate."""
    found = analysis.estimate
    if found is None or analysis.ranks == 1:
        return ""
    permuted = analysis.permuted.lost_part or 0.0
    few = "; too few sequences to compare balancers" if (found.sequences or LEAST_SEQUENCES) < LEAST_SEQUENCES else ""
    scaled = f", scaled from {found.layers_traced} to {plural(found.layers_of_model, 'MoE layer')}"
    return (
        f"Estimate: imbalance costs {found.lost_s:.3g} s of a step of {found.step_s:.3g} s ({found.lost_part:.0%}; of "
        f"it, waiting {found.waiting_s / found.step_s:.0%}; {permuted:.0%} with permuted expert ids) on "
        f"{found.cluster} with {found.model}"
        f"{scaled if found.layers_traced < found.layers_of_model else ''}"
        f"{few}."
    )


def notes(analysis: Analysis) -> list[str]:
    """Returns the assumptions and limits behind the figures."""
    counts, estimate = analysis.counts, analysis.estimate
    texts = [
        "Homes are contiguous (static), and sequences are packed into micro-steps as in trimtab plan. max_vio is "
        "max/mean - 1 of rank loads, balancedness is mean/max."
    ]
    if analysis.ranks > 1:
        texts.append(
            f"Permuted ids: experts of each layer in random order, mean of {analysis.permuted.permutations} orders. "
            "The difference comes from hot experts with neighbouring ids, which contiguous homes put on one rank."
        )
    if analysis.placements.history == "half":
        texts.append("The trace has one step, so the first half of its micro-steps is used as the past of the second.")
    if counts.skipped_steps:
        texts.append(f"The first {counts.skipped_steps} steps were left out, to keep memory small; see --step.")
    if counts.unknown_routes:
        pairs = counts.num_tokens * counts.num_layers
        texts.append(
            f"{counts.unknown_routes / pairs:.1%} of (token, layer) pairs have no recorded route and are not counted."
        )
    per_expert = counts.num_tokens * counts.top_k / counts.num_micro_steps / counts.num_experts
    if per_expert < 16:
        texts.append(
            f"A micro-step has {plural(round(per_expert), 'token')} for the mean expert: much of the imbalance is "
            "random, as in a real run with so few tokens."
        )
    if estimate:
        measured = "of the last step" if estimate.steps == 1 else f"mean of the last {estimate.steps} steps"
        scaled = "taken as recorded" if estimate.sequences is None else "scaled to the whole step"
        texts.append(
            f"Seconds are those of static in trimtab simulate: recompute and update, {measured}, "
            f"{scaled}. The cost of imbalance is what they would be less with perfectly even routing; waiting is what "
            "they would be less if every expert phase took the mean of the ranks, with the same rows."
        )
    elif analysis.no_seconds:
        texts.append(analysis.no_seconds)
    least = PlanSettings().smallest_share
    if HOT_FACTOR * per_expert < least:
        texts.append(
            f"Replicas that trimtab plans compute at least {least} tokens; with {per_expert:.0f} for the mean expert "
            "it makes few, and more in larger micro-steps."
        )
    return texts
