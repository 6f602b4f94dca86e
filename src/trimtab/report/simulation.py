"""Texts and values of a simulated step: answer, setting, results of balancers, and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trimtab.analysis.summary import unknown_text
from trimtab.cluster import Layout
from trimtab.cluster.parallel_layout import SELECTIVE
from trimtab.figures import plural
from trimtab.planner import SequenceCounts
from trimtab.planner.schedule.token_budget import SLACK
from trimtab.policies.policy import chosen_constants
from trimtab.policies.trimtab import Trimtab
from trimtab.report.model import LoadMap, PolicyResult, Report, Timeline
from trimtab.report.number_text import bytes_text, seconds
from trimtab.report.policies_table import sensitivity_table, sweep_table
from trimtab.report.tables import Facts
from trimtab.simulator.comparison import Outcome, fits, operations
from trimtab.simulator.comparison_case import ComparisonCase
from trimtab.simulator.memory import ways_to_fit
from trimtab.simulator.simulated_case import PERMUTATION_SEED, SimulatedCase
from trimtab.simulator.step import StepSettings, imbalance_cost
from trimtab.simulator.yardstick import yardstick
from trimtab.timeline.recorded_operations import KINDS
from trimtab.trace import RoutingTrace

ABOUT = {
    "nothing": "uses no routing; no replicas",
    "past": "plans from past steps",
    "step": "plans from the step's routing",
    "micro-step": "plans from each micro-step's routing",
    "layer": "plans in each layer, after its router",
}


DISPATCH_TEXTS = {
    True: "sends a token to a node once, as DeepEP, HybridEP and MoRI do",
    False: "sends every row to its rank, as all-to-alls do",
}
# By `StepSettings.checkpointing`.
RECOMPUTED = {False: "without", SELECTIVE: "selective", True: "with"}


def simulation_report(source: str, trace: RoutingTrace, cases: Sequence[SimulatedCase]) -> Report:
    """The page: all cases in a table if there are several, and the first that fits."""
    first = fitting_first(cases)[0]
    loads = {name: outcome.simulated.work.loads_MLR for name, outcome in first.outcomes.items()}
    return Report(
        title=f"Expert load of {first.case.model.name} on {plural(first.ranks, 'rank')}",
        answer=answers(cases),
        facts=setting_facts(source, trace, first),
        policies=policy_results(first),
        layer_names=tuple(str(index) for index in trace.layer_indices),
        before=LoadMap("static", loads["static"]),
        after=LoadMap(first.reported, loads[first.reported]),
        timelines=timelines(first),
        notes=notes(trace, cases),
        table_title=table_title(first),
        cases=sweep_table(cases) if len(cases) > 1 else None,
        device_bytes=first.case.cluster.device_bytes,
        assumed=assumed(cases),
        sensitivity=sensitivity_table(first.sensitivity) if first.sensitivity else None,
    )


def setting_facts(source: str, trace: RoutingTrace, simulated: SimulatedCase) -> Facts:
    """Trace, model, cluster and options."""
    case, settings = simulated.case, simulated.case.settings
    cluster = case.cluster
    micro_steps = simulated.outcomes["static"].plan.num_micro_steps
    mirror = max(outcome.mirror_bytes for outcome in simulated.outcomes.values())
    return (
        (
            "trace",
            f"{source}, step {trace.steps[0]}: {plural(trace.num_tokens, 'token')}, "
            f"{plural(trace.num_sequences, 'sequence')}",
        ),
        ("steps", f"{case.measured}, after {_known_steps(case)} that balancers know"),
        ("model", f"{case.model.name}; the trace has {trace.shape_text}"),
        ("cluster", f"{plural(cluster.ranks, 'rank')}, {cluster.ranks_per_node} per node, {cluster.name}"),
        ("dispatcher", DISPATCH_TEXTS[cluster.dispatch_forwards]),
        *slots_facts(case, simulated.outcomes),
        ("micro-steps", f"{micro_steps}, each of up to {case.token_budget:,} tokens per rank"),
        ("optimizer steps", f"{case.mini_batches}"),
        ("expert-parallel groups", f"{settings.groups}"),
        *layout_facts(settings),
        ("compared with", f"presets, other balancers and planning times of yardstick {yardstick()}"),
        ("terms", "equal: same homes, schedule and slots" if case.equal_terms else "own recipe of each policy"),
        (
            "memory",
            f"{bytes_text(cluster.device_bytes)} per rank; {settings.sharding}, "
            f"{RECOMPUTED[settings.checkpointing]} activation checkpointing",
        ),
        *([("host memory", f"{bytes_text(mirror)} per node for mirrored experts")] if mirror else []),
    )


def slots_facts(case: ComparisonCase, outcomes: Mapping[str, Outcome]) -> Facts:
    """Slots of a rank; where balancers have a choice, what each has and what others would make of its step."""
    if not case.slots:
        return (("slots", f"{plural(case.cluster.slots_per_rank, 'replica')} per rank"),)
    with_choice = {name: outcome for name, outcome in outcomes.items() if outcome.slots_s}
    chosen = ", ".join(f"{name} {outcome.plan.slots_per_rank}" for name, outcome in with_choice.items())
    rows = [("slots", f"the best of {', '.join(map(str, case.slots))} per rank: {chosen or 'no balancer has any'}")]
    for name, outcome in with_choice.items():
        if isinstance(outcome.policy, Trimtab):
            found = ", ".join(f"{number}: {seconds(step_s)}" for number, step_s in outcome.slots_s.items())
            rows.append((f"{name} by slots", f"{found}, predicted"))
    return tuple(rows)


def _known_steps(case: ComparisonCase) -> str:
    return "another drawing of it" if case.past_is_drawn else plural(len(case.steps) - case.measured, "step")


def layout_facts(settings: StepSettings) -> Facts:
    """The layout, where it is not expert parallelism alone."""
    layout = settings.layout
    if layout == Layout():
        return ()
    return (("layout", f"TP {layout.tp}, {plural(layout.pp, 'pipeline stage')}, CP {layout.cp}"),)


def table_title(simulated: SimulatedCase) -> str:
    """Title of the table of step times."""
    traced, layers = simulated.case.sequences.num_layers, simulated.case.model.moe_layers
    scaled = "" if traced == layers else f", scaled from {traced} to {plural(layers, 'MoE layer')}"
    measured = simulated.case.measured
    steps = "one step" if measured == 1 else f"a step, mean of {measured}"
    return f"Recompute and update of {steps}{scaled}"


def answers(cases: Sequence[SimulatedCase]) -> str:
    """The result of the first case that fits, and of the first with each other dispatcher."""
    if len(cases) == 1:
        return answer(cases[0])
    first = {case.dispatcher: case for case in reversed(fitting_first(cases))}
    differ_in_dispatcher = len(first) == len(cases)
    return "\n".join(
        f"{f'{case.dispatcher} sent'.capitalize() if differ_in_dispatcher else case.text}: {answer(case)}"
        for case in cases
        if first[case.dispatcher] is case
    )


def assumed(cases: Sequence[SimulatedCase]) -> str:
    """What nobody stated, with the options that change it; "" if nothing was assumed."""
    return " ".join(dict.fromkeys(text for each in cases for text in each.case.assumed))


def fitting_first(cases: Sequence[SimulatedCase]) -> list[SimulatedCase]:
    """Those that fit the device, then the others, each in their order."""
    return sorted(cases, key=lambda case: not case.fits)


def answer(simulated: SimulatedCase) -> str:
    """The result in a few sentences: what does not fit, the cost of imbalance, speed-ups, the fastest balancer."""
    case = simulated.case
    static_s = simulated.seconds("static")
    unknown = unknown_text(unknown_part(case.sequences))
    cost = f"Imbalance costs {simulated.cost:.0%} of each step{unknown}"
    where = f"on {plural(case.cluster.ranks, f'{case.cluster.name} rank')}"
    ideal = static_s / simulated.seconds("balanced")
    return " ".join(
        filter(
            None,
            (
                _memory_answer(simulated),
                f"{cost} {where} (of it, waiting {simulated.waiting:.0%}); {_speed_answer(simulated)}.",
                f"Perfectly even routing would make it {ideal:.2f} times as fast.",
                _permuted_answer(simulated),
            ),
        )
    )


def _speed_answer(simulated: SimulatedCase) -> str:
    reported, fastest, static_s = simulated.reported, simulated.fastest, simulated.seconds("static")
    if fastest == reported == "static":
        return "none of these balancers reduces it"
    speed = static_s / simulated.seconds(reported)
    text = f"{reported} makes the step {speed:.2f} times as fast as static"
    if "eplb" in simulated.outcomes and reported != "eplb":
        if simulated.case.knows_past:
            text += f" and {simulated.seconds('eplb') / simulated.seconds(reported):.2f} times as fast as eplb"
        elif simulated.case.earlier:
            text += " (too few sequences to compare it with eplb)"
        else:
            text += " (eplb has no earlier step to plan from)"
    if fastest != reported:
        less = 1 - simulated.seconds(fastest) / simulated.seconds(reported)
        gain = f"{static_s / simulated.seconds(fastest):.2f} times as fast as static"
        speed_up = "" if fastest == "static" else f"{gain}, "
        is_faster = f"is faster: {speed_up}{less:.1%} less time than {reported}"
        text += f"; {fastest} {is_faster if less > 0 else f'is the fastest that fits: {gain}'}"
    return text


def _permuted_answer(simulated: SimulatedCase) -> str:
    permuted_s = simulated.permuted_s
    static_s, eplb_s = permuted_s["static"], permuted_s.get("eplb")
    text = f"With expert ids permuted, imbalance costs {imbalance_cost(static_s, permuted_s['balanced']):.0%}"
    if "trimtab" in permuted_s:
        text += f", and trimtab is {static_s / permuted_s['trimtab']:.2f} times as fast as static"
        if eplb_s and simulated.case.knows_past:
            text += f" and {eplb_s / permuted_s['trimtab']:.2f} times as fast as eplb"
    return f"{text}."


def _memory_answer(simulated: SimulatedCase) -> str:
    """What does not fit the device, and what would; empty if all balancers fit."""
    case = simulated.case
    over = {name: outcome for name, outcome in simulated.real.items() if not fits(case, outcome)}
    if not over:
        return ""
    device = bytes_text(case.cluster.device_bytes)
    name = simulated.reported if simulated.reported in over else max(over, key=lambda each: over[each].peak_bytes)
    ways = ways_to_fit(over[name].load, case.model, case.settings, case.cluster.device_bytes)
    remedy = f"fits {', or '.join(ways)}" if ways else "fits with no sharding, checkpointing, EP or --pp"
    needs = f"needs {bytes_text(over[name].peak_bytes)} a rank; the device has {device}"
    if len(over) == len(simulated.real):
        return f"Does not fit: EP {case.cluster.ranks} {needs}. It {remedy}."
    return f"Does not fit: {', '.join(over)}; {name} {needs}. {name} {remedy}."


def notes(trace: RoutingTrace, cases: Sequence[SimulatedCase]) -> tuple[str, ...]:
    """Assumptions and limits of the figures."""
    case = cases[0].case
    layers, all_layers = trace.num_layers, case.model.moe_layers
    texts = [
        "Step time is recompute and update, predicted by a timeline model of the cluster, without the rollout. The "
        "cost of imbalance is what static would take less with perfectly even routing; waiting is what it would take "
        "less if every expert phase took the ranks' mean time, with the same rows.",
        scale_note(case),
    ]
    if layers != all_layers:
        texts.append(
            f"The trace has {layers} of the model's {plural(all_layers, 'MoE layer')}; seconds and bytes are scaled to "
            f"the whole model. Timelines show {plural(layers, 'layer')}."
        )
    by_case = {each.text: _micro_steps_note(each) for each in cases}
    texts += [text if len(cases) == 1 else f"{name}: {text}" for name, text in by_case.items() if text]
    if not case.earlier:
        texts.append("The trace has no earlier step: balancers that use past loads have none, so eplb has no copies.")
    if case.measured > 1:
        texts.append(
            f"Seconds are the mean of {case.measured} steps; loads and timelines are those of the last one, and memory "
            "is that of the step that needs most."
        )
    texts.append(
        "The first move of a layer's experts, in any step of the trace, is paid once: its seconds stand apart (first "
        "moves). Later moves are in the step that makes them. This is so for all balancers."
    )
    texts += [f"{name} has the best of its settings: {chosen}." for name, chosen in _chosen(cases[0]).items()]
    most = max(case.slots, default=case.cluster.slots_per_rank)
    own = [name for name, outcome in cases[0].real.items() if outcome.plan.slots_per_rank > most]
    if own:
        texts.append(f"With slots of their own, beyond {plural(most, 'slot')}: {', '.join(own)}.")
    if unknown := unknown_part(case.sequences):
        texts.append(f"The experts of {unknown:.1%} of rows are not recorded; the figures include estimates for them.")
    texts.append(
        f"Permuted ids: the experts of each layer in one random order (seed {PERMUTATION_SEED}), so hot experts "
        "are neighbours only by chance."
    )
    texts.append(
        "Memory is an estimate for one micro-step at a time, without CUDA context, workspaces and fragmentation."
    )
    return tuple(texts)


def unknown_part(sequences: SequenceCounts) -> float:
    """Part of the rows whose experts are not recorded."""
    rows = int(sequences.lengths.sum()) * sequences.num_layers * sequences.top_k
    return int(sequences.unknown_SL.sum(dtype=np.int64)) / max(1, rows)


def scale_note(case: ComparisonCase) -> str:
    """What the trace is taken as: whole steps, or a part of each."""
    if case.recorded is None:
        return "The trace is taken as whole steps; where it has a part of each, give --step-tokens or --sampled."
    tokens = int(case.sequences.lengths.sum())
    past = " The trace has one step, so balancers know another drawing of it as the one before."
    return (
        f"Scaled to steps of {tokens:,} tokens: prompts are drawn with all their answers, with replacement, from "
        f"{plural(case.recorded, 'recorded sequence')} or more a step, and the skew that this adds is removed "
        f"(2 f(all) - f(half)).{past if case.past_is_drawn else ''}"
    )


def _micro_steps_note(simulated: SimulatedCase) -> str:
    """Why there are more or fewer micro-steps than requested; empty if there are as many."""
    case, asked, groups = simulated.case, simulated.micro_steps, simulated.case.settings.groups
    made = -(-simulated.outcomes["static"].plan.num_micro_steps // groups)
    if asked is None or made == asked:
        return ""
    lengths, places = case.sequences.lengths, case.cluster.ranks * groups
    mean, longest = int(lengths.sum()) / (places * asked), int(lengths.max())
    why = (
        f"the token budget, {case.token_budget:,} per rank, has {SLACK:.0%} of room for packing and is that of the "
        "trace's largest step"
    )
    if longest > mean * (1 + SLACK):
        why = (
            f"the longest sequence has {longest:,} tokens, and {plural(asked, 'micro-step')} would be {mean:,.0f} "
            "tokens per rank"
        )
    elif made > asked and case.mini_batches > 1:
        why = f"each of the {case.mini_batches} optimizer steps has micro-steps of its own"
    elif made > asked:
        why = f"sequences of up to {longest:,} tokens do not fill the budget of {case.token_budget:,} tokens per rank"
    return f"Asked for {plural(asked, 'micro-step')}, made {made}: {why}."


def policy_results(simulated: SimulatedCase) -> tuple[PolicyResult, ...]:
    """Figures of the balancers."""
    has_eplb = "eplb" in simulated.outcomes and simulated.case.knows_past
    return tuple(
        PolicyResult(
            name=outcome.name,
            about=_about(simulated, outcome),
            step_time_s=outcome.simulated.step_time_s,
            speedup=simulated.seconds("static") / outcome.simulated.step_time_s,
            fraction_of_balanced=simulated.seconds("balanced") / outcome.simulated.step_time_s,
            max_over_mean=outcome.balance.mean,
            parts_s=_bars(outcome.simulated.parts_s),
            memory_bytes=_purposes(outcome.memory),
            replicas_per_instance=outcome.replicas_per_instance,
            max_over_mean_p99=outcome.balance.p99,
            cross_node_fraction=outcome.cross_node_fraction,
            speedup_over_eplb=simulated.seconds("eplb") / outcome.simulated.step_time_s if has_eplb else None,
            fits=fits(simulated.case, outcome),
            first_moves_s=outcome.first_moves_s,
            is_ideal=outcome.policy.traits.ideal,
            mark=_mark(simulated, outcome),
        )
        for outcome in simulated.outcomes.values()
    )


def _mark(simulated: SimulatedCase, outcome: Outcome) -> str:
    """What makes a balancer's figures not comparable with those of others; empty if nothing does."""
    ours = simulated.outcomes.get("trimtab", outcome).plan.slots_per_rank
    marks = {
        "no history": _lacks_history(simulated, outcome),
        "too few sequences": outcome.policy.traits.known_at == "past" and simulated.case.is_too_small,
        "more slots": outcome.plan.slots_per_rank > ours,
    }
    return ", ".join(mark for mark, is_so in marks.items() if is_so)


def _lacks_history(simulated: SimulatedCase, outcome: Outcome) -> bool:
    """Whether a balancer plans from past steps, and the trace has none. `static` plans from nothing."""
    return outcome.policy.traits.known_at == "past" and outcome.name != "static" and not simulated.case.earlier


def _purposes(memory: Mapping[str, int]) -> dict[str, float]:
    """Bytes by purpose, those of experts and of dense parts together."""
    found: dict[str, float] = {}
    for purpose, size in memory.items():
        name = purpose.removeprefix("expert ").removeprefix("dense ")
        found[name] = found.get(name, 0.0) + size
    return found


def _about(simulated: SimulatedCase, outcome: Outcome) -> str:
    """What a balancer knows, and whether its copies are confined to a node of several."""
    traits, cluster = outcome.policy.traits, simulated.case.cluster
    if traits.ideal:
        return "perfectly even routing"
    texts = [ABOUT[traits.known_at]]
    if traits.within_node and not simulated.case.equal_terms and cluster.nodes > 1:
        texts.append("copies stay inside the node")
    if outcome.name == "scheduled":
        texts.append("sequences are packed by time")
    return "; ".join(texts)


def _chosen(simulated: SimulatedCase) -> dict[str, str]:
    """The constants that balancers have the best of, by name."""
    found = {name: chosen_constants(outcome.policy) or {} for name, outcome in simulated.real.items()}
    return {
        name: ", ".join(f"{constant} {'never' if value is None else value}" for constant, value in constants.items())
        for name, constants in found.items() if constants
    }  # fmt: skip


def _bars(parts_s: Mapping[str, float]) -> dict[str, float]:
    """Non-negative parts: the last rank may have less compute than the mean if it is late for other reasons."""
    below = min(0.0, parts_s["imbalance"])
    return dict(parts_s) | {"experts": parts_s["experts"] + below, "imbalance": parts_s["imbalance"] - below}


def timelines(simulated: SimulatedCase) -> tuple[Timeline, ...]:
    """The middle micro-step of the balancer shown on the page, and of `static`."""
    names = dict.fromkeys((simulated.reported, "static"))
    return tuple(_timeline(simulated.case, simulated.outcomes[name]) for name in names)


def _timeline(case: ComparisonCase, outcome: Outcome) -> Timeline:
    micro_step = outcome.plan.num_micro_steps // 2
    events = operations(case, outcome, micro_step)
    return Timeline(
        title=f"{outcome.name}, update of micro-step {micro_step}{_layers_text(case)}",
        names=KINDS,
        kind_N=events.kind_N,
        lane_N=events.lane_N,
        rank_N=events.rank_N,
        layer_N=events.layer_N,
        start_N=np.ascontiguousarray(events.spans_N2[:, 0]),
        end_N=np.ascontiguousarray(events.spans_N2[:, 1]),
    )


def _layers_text(case: ComparisonCase) -> str:
    layers = case.sequences.num_layers
    return "" if case.scale == 1 else f", {layers} of {plural(case.model.moe_layers, 'MoE layer')}"
