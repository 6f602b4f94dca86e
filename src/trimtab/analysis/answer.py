"""The answer in plain words: is imbalance costing me, where, and would foresight help?"""

from __future__ import annotations

from trimtab.analysis.analysis import Analysis, worst_layers
from trimtab.analysis.foresight import SLOTS
from trimtab.analysis.hot import HOT
from trimtab.planner.instances import PlanSettings

# Expert time lost, below which balancing is not worth the trouble.
LITTLE = 0.03
# And from which on it surely is.
MUCH = 0.1
# Parts of the loss, or of expert time, that make no difference worth a word.
SLIGHT = 0.02


def answer(analysis: Analysis) -> str:
    """One sentence or two."""
    ratio, lost = analysis.total.max_over_mean.mean, analysis.total.lost
    if analysis.ranks == 1:
        return "One rank computes all experts, so there is nothing to balance; try --ranks."
    opening = (
        f"On {analysis.ranks} ranks the busiest computes {ratio:.2f} times the mean, and ranks wait {lost:.0%} of "
        "their expert time"
    )
    if lost < LITTLE:
        return f"{opening}: there is next to nothing to gain."
    if analysis.counted.num_micro_steps == 1:
        return (
            f"{opening}. All tokens fit one micro-step, so this trace can't tell whether the load changes between "
            "micro-steps."
        )
    return f"{opening}. {_helps(analysis)}"


def _helps(analysis: Analysis) -> str:
    found = analysis.foresight
    past, step = found.best("past"), found.best("step")
    if past is None or step is None or step.won_back is None or past.won_back is None:
        return "This trace can't tell what would help."
    last = "the step before" if found.history == "step" else "the first half of the step"
    # A step's own loads may, by luck, place it worse than those of the step before.
    best = min(step, past, key=lambda way: way.lost)
    wins = best.won_back or 0.0
    if wins - past.won_back < 2 * SLIGHT:
        best = past
        fixed = f"A placement by {last} would win back {_percent(past.won_back)} of that"
    else:
        fixed = (
            f"A fixed placement would win back {_percent(wins)} of that if it knew the step, and "
            f"{_percent(past.won_back)} going by {last}"
        )
    if past.lost < LITTLE:
        return f"{fixed}, so a balancer that looks back is enough."
    if best.lost < LITTLE:
        return f"{fixed}, so foresight helps, and one plan a step is nearly enough."
    still = f"{best.lost:.0%} of expert time would still be lost"
    if step.lost_in_sum > best.lost / 2:
        return f"{fixed}; {still}, more than equal shares over {SLOTS} replicas a rank can level."
    verdict = "so foresight is worth it" if best.lost >= MUCH else "which only foresight sees"
    return f"{fixed}; {still}, since loads change from micro-step to micro-step, {verdict}."


def _percent(part: float) -> str:
    return f"{part:.0%}" if part >= SLIGHT else "nothing"


def where(analysis: Analysis) -> str:
    """Which layers lose the time, in one sentence; "" if there is little to lose, or one layer."""
    layers = len(analysis.layers)
    if layers < 2 or analysis.total.lost < LITTLE:
        return ""
    worst = worst_layers(analysis)[: max(1, layers // 4)]
    share = analysis.lost_share_L[worst].sum()
    names = ", ".join(str(analysis.counted.layer_indices[layer]) for layer in worst[:3])
    if len(worst) == 1:
        return (
            f"Layer {names} loses most of all: {share:.0%} of the lost time ({1 / layers:.0%} would be its even share)."
        )
    even = len(worst) / layers
    spread = "Layers lose alike" if share < 1.25 * even else "Some layers lose more than others"
    return f"{spread}: the worst quarter ({names}{', ...' if len(worst) > 3 else ''}) has {share:.0%} of the lost time."


def cost(analysis: Analysis) -> str:
    """What it costs in seconds; "" without a price."""
    found = analysis.price
    if found is None or analysis.ranks == 1:
        return ""
    return (
        f"By estimate {found.lost_s:.3g} s of a step of {found.step_s:.3g} s, {found.lost_part:.0%}, on "
        f"{found.cluster} with {found.model}."
    )


def notes(analysis: Analysis) -> list[str]:
    """What a reader should know before quoting a figure."""
    counted, found = analysis.counted, analysis.foresight
    said = [
        "Homes are contiguous (static), and sequences packed as trimtab plan does; max_vio is max/mean - 1 of rank "
        "loads, balancedness mean/max.",
    ]
    if found.history == "half":
        said.append("The trace has one step, so the first half of its micro-steps is taken for the past of the second.")
    if counted.skipped_steps:
        said.append(f"The first {counted.skipped_steps} steps were left out, to keep memory small; see --step.")
    if counted.unknown_routes:
        pairs = counted.num_tokens * counted.num_layers
        said.append(
            f"{counted.unknown_routes / pairs:.1%} of (token, layer) pairs have no recorded route and count nowhere."
        )
    per_expert = counted.num_tokens * counted.top_k / counted.num_micro_steps / counted.num_experts
    if per_expert < 16:
        said.append(
            f"A micro-step has {per_expert:.0f} tokens for the mean expert: much of the imbalance is chance, as it is "
            "in a run with so few."
        )
    if analysis.price:
        said.append(
            "Seconds are an estimate of recompute and update: busiest ranks' work added up, nothing overlapping. "
            "trimtab simulate runs the step."
        )
    elif analysis.ranks > 1:
        said.append("No model that comes with Trimtab routes like this; name yours with --model for seconds.")
    least = PlanSettings().smallest_share
    if HOT * per_expert < least:
        said.append(
            f"Copies that trimtab plans compute {least} tokens at least; with {per_expert:.0f} for the mean expert it "
            "makes few, and comes to 1.00 only with larger micro-steps."
        )
    else:
        said.append("A plan for every micro-step comes to about 1.00; trimtab plan and trimtab simulate say how near.")
    return said
