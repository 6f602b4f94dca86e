"""An advice: figures of strategies, sentences, tables, its JSON, and the sections of its page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape as html_escape
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from trimtab.figures import by_key, measured, plural, with_documented_figures
from trimtab.report.number_text import NONE, bytes_text, digits, seconds
from trimtab.report.policies_table import ABOVE_EVEN, WaterfallRow, above_even, waterfall_rows, waterfall_table
from trimtab.report.simulation import layout_facts, scale_note, slots_facts
from trimtab.report.tables import (
    Facts,
    Row,
    TableData,
    first_lines,
    html_table,
    terminal_facts,
    terminal_table,
    without_empty_columns,
)
from trimtab.report.widgets import Section, facts, lead, notes_section, summary, tiles
from trimtab.simulator.comparison_case import ComparisonCase
from trimtab.simulator.draws import Drawn, Estimate
from trimtab.simulator.memory import ways_to_fit
from trimtab.simulator.resampling import LEAST_SEQUENCES
from trimtab.simulator.step import WAITING, imbalance_cost
from trimtab.simulator.strategies import NOTHING, RunStrategy

# docs/simulator.md, "Accuracy".
ERROR_BAND = (
    "The simulator's own error: measured steps on 2 CPU ranks took 6% to 10% longer than simulated ones, in the same "
    "order; it has not been compared with several GPUs."
)


@with_documented_figures
@dataclass(frozen=True)
class StrategyFigures:
    """Figures of one strategy: `step_s`, seconds of a step; `speedup` over doing nothing; `over_eplb`, None where that
    can't be compared; and those below. Money and GPU hours are of 1,000 steps.
    """

    strategy: RunStrategy
    step_s: Estimate
    speedup: Estimate
    over_eplb: Estimate | None
    of_even: float = measured("step time with perfectly even routing, divided by this one", key="of_even")
    gpu_hours: float = measured("of all GPUs", "h", key="gpu_hours_of_1000_steps")
    money: float | None = measured("None without a price", key="money_of_1000_steps")
    peak_bytes: int = measured("of the rank that needs most", "bytes", key="peak_bytes")
    fits: bool = measured("whether the device has them", key="fits")
    hit_rate: float | None = measured(
        "of a prediction, the part of the predicted replicas that got rows; None for others", key="hit_rate"
    )
    largest_tokens: int = measured(
        "most tokens of a rank in a micro-step that fit, with the imbalance of the simulated micro-steps; 0: none fit",
        key="largest_micro_batch_tokens",
    )
    largest_rows: int = measured("most rows of a rank in a layer then", key="largest_micro_batch_rows")

    @property
    def gain(self) -> Estimate:
        """Part of the step that it saves, against doing nothing."""
        return Estimate(
            *(1 - 1 / max(each, 1e-9) for each in (self.speedup.value, self.speedup.low, self.speedup.high))
        )


@dataclass(frozen=True, eq=False)
class Advice:
    """What to do on a cluster.

    Attributes:
        strategies: by seconds, the least first.
        chosen: the advised one; doing nothing where none pays.
        best: the fastest but doing nothing.
        missing: strategies that need steps before, which the trace does not have.
        static, target: the ends of the waterfall: doing nothing, and the chosen strategy, or the best.
        even_s: seconds with perfectly even routing.
        case: of the first drawing.
        source: name of the trace.
        sequences: recorded ones of the measured step that has fewest. layers: of the trace; the case has some of them.
        gpus: of all groups.
        draws: drawings of scaled steps.
        break_even: max/mean of rank loads from which the best strategy pays, and the trace's; None if unknown.
        gpu_hour: price of a GPU's hour.
        least_gain: part of a step from which a strategy pays.
    """

    strategies: tuple[StrategyFigures, ...]
    chosen: StrategyFigures
    best: StrategyFigures
    missing: tuple[RunStrategy, ...]
    static: Drawn
    target: Drawn
    even_s: float
    case: ComparisonCase
    source: str
    sequences: int
    layers: int
    gpus: int
    draws: int
    break_even: tuple[Estimate, float] | None
    gpu_hour: float | None
    least_gain: float

    @property
    def cluster(self) -> str:
        """Kind of nodes."""
        return self.case.cluster.name

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.case.model.name

    @property
    def title(self) -> str:
        """Of the page."""
        return f"Advice for {self.model} on {plural(self.gpus, 'GPU')}"

    @property
    def nothing(self) -> StrategyFigures:
        """Figures of doing nothing."""
        return next(each for each in self.strategies if each.strategy is NOTHING)

    @property
    def verdict(self) -> str:
        """`too few sequences`, `not worth it`, or the name of the advised strategy."""
        if self.case.is_too_small:
            return "too few sequences"
        return "not worth it" if self.chosen.strategy is NOTHING else self.chosen.strategy.name

    @property
    def assumed(self) -> str:
        """What nobody stated, with the options that change it; "" if nothing was assumed."""
        return " ".join(self.case.assumed)

    @property
    def answer(self) -> str:
        """The recommendation in one sentence."""
        if self.case.is_too_small:
            return (
                f"Too few sequences: {self.sequences} of a step were recorded; record {LEAST_SEQUENCES} or more to "
                "choose a strategy."
            )
        chosen, nothing = self.chosen, self.nothing
        if chosen.strategy is NOTHING:
            best = self.best
            return (
                f"Not worth it: the best strategy, {best.strategy.name}, saves {best.gain.value:.1%} of a step "
                f"({_range(best.gain)}), less than {self.least_gain:.0%}."
            )
        memory = f"{bytes_text(chosen.peak_bytes)} of {bytes_text(self.case.cluster.device_bytes)} a rank"
        fits = f"it fits ({memory})" if chosen.fits else f"it does not fit ({memory}), nor does any other"
        needs = f"; it needs {chosen.strategy.needs}" if chosen.strategy.needs else ""
        saved = nothing.gpu_hours - chosen.gpu_hours
        money = f" ({_amount(saved * self.gpu_hour)} at {self.gpu_hour:g} an hour)" if self.gpu_hour is not None else ""
        times = f"a step takes {seconds(chosen.step_s.value)} instead of {seconds(nothing.step_s.value)}"
        return (
            f"Use {chosen.strategy.name} ({chosen.strategy.about}): {times}, {chosen.gain.value:.0%} less "
            f"({_range(chosen.gain)}), which saves {_amount(saved)} GPU hours{money} in 1,000 steps; {fits}{needs}."
        )

    def figures(self) -> dict[str, Any]:
        """The JSON of `trimtab advise`; `docs/advise.md` explains every key."""
        return {
            "verdict": self.verdict,
            "recommendation": self.answer,
            "cluster": asdict(self.case.cluster),
            "model": self.model,
            "gpus": self.gpus,
            "layout": asdict(self.case.settings.layout),
            "steps": self.case.measured,
            "earlier_steps": len(self.case.steps) - self.case.measured,
            "tokens": int(self.case.sequences.lengths.sum()),
            "assumed": list(self.case.assumed),
            "cost": imbalance_cost(self.nothing.step_s.value, self.even_s),
            "recorded_sequences": self.sequences,
            "layers_simulated": self.case.sequences.num_layers,
            "layers_traced": self.layers,
            "draws": self.draws,
            "even_s": self.even_s,
            "strategies": {
                each.strategy.name: {
                    "step_s": asdict(each.step_s),
                    "speedup": asdict(each.speedup),
                    "over_eplb": asdict(each.over_eplb) if each.over_eplb else None,
                    **by_key(each),
                    "needs": each.strategy.needs,
                    "settings": list(each.strategy.settings),
                }
                for each in self.strategies
            },
            "missing": [strategy.name for strategy in self.missing],
            "break_even_max_over_mean": self.break_even[0].value if self.break_even else None,
            "max_over_mean": self.static.outcomes[0].balance.mean,
            "waterfall_s": {row.name: row.seconds for row in waterfall(self)},
        }


def waterfall(advice: Advice) -> list[WaterfallRow]:
    """Seconds from doing nothing to the chosen strategy."""
    return waterfall_rows(advice.static.simulated, advice.target.simulated, advice.target.outcomes[0].name)


def _range(estimate: Estimate) -> str:
    return f"{max(estimate.low, -9.99):.0%} to {estimate.high:.0%}"


def advice_table(advice: Advice) -> TableData:
    """Strategies by seconds."""
    longest = max(each.step_s.value for each in advice.strategies)
    has_spread = any(each.step_s.low != each.step_s.high for each in advice.strategies)

    def row(each: StrategyFigures) -> Row:
        step = each.step_s
        mark = " (advised)" if each is advice.chosen and advice.verdict == each.strategy.name else ""
        hits = f"; {each.hit_rate:.0%} of its replicas get rows" if each.hit_rate is not None else ""
        interval = f"{seconds(step.low, longest).split()[0]} to {seconds(step.high, longest)}"
        return Row(
            each.strategy.name + mark,
            (
                seconds(step.value, longest),
                interval if has_spread else NONE,
                f"{each.speedup.value:.2f}x",
                NONE if each.over_eplb is None else f"{each.over_eplb.value:.2f}x",
                f"{each.of_even:.0%}",
                f"{bytes_text(each.peak_bytes)}{'' if each.fits else '!'}",
            ),
            about=f"{each.strategy.about}{hits}. Needs: {each.strategy.needs or 'nothing'}.",
            bar=step.value / longest,
            is_ours=each is advice.chosen,
        )

    columns = ("strategy", "step", "interval", "speed-up", "over eplb", "of even", "memory")
    rows = tuple(map(row, advice.strategies))
    return without_empty_columns(TableData("Strategies, the fastest first", columns, rows))


def cost_table(advice: Advice) -> TableData:
    """GPU hours and money of 1,000 steps, and what each strategy needs."""

    def row(each: StrategyFigures) -> Row:
        saved = advice.nothing.gpu_hours - each.gpu_hours
        money = NONE if advice.gpu_hour is None else _amount(saved * advice.gpu_hour)
        cells = (_amount(each.gpu_hours), _amount(saved), money, each.strategy.needs or "nothing")
        return Row(each.strategy.name, cells, is_ours=each is advice.chosen)

    columns = ("strategy", "hours", "saved", "money saved", "needs")
    rows = tuple(map(row, advice.strategies))
    return without_empty_columns(TableData("GPU hours of 1,000 steps", columns, rows))


def _amount(value: float) -> str:
    """Hours or money; less than half a hundredth is nothing."""
    return "0" if abs(value) < 0.005 else digits(value)


def settings_to_copy(advice: Advice) -> list[str]:
    """Lines for the advised strategy; empty if there are none."""
    return [] if advice.chosen.strategy is NOTHING or advice.case.is_too_small else [*advice.chosen.strategy.settings]


def ways_text(advice: Advice) -> str:
    """Settings with which the advised strategy fits; "" if it does already."""
    if advice.chosen.fits:
        return ""
    case = advice.case
    load = next(each for each in (advice.target, advice.static) if each.outcomes[0].name == advice.chosen.strategy.name)
    ways = ways_to_fit(load.outcomes[0].load, case.model, case.settings, case.cluster.device_bytes)
    fits = f"fits {', or '.join(ways)}" if ways else "fits with no sharding, checkpointing, EP or --pp"
    return f"{advice.chosen.strategy.name} {fits}."


def micro_batch_text(advice: Advice) -> str:
    """The largest micro-batches that fit, with the advised strategy (or the best) and without any."""
    named = advice.best if advice.chosen.strategy is NOTHING else advice.chosen

    def text(each: StrategyFigures) -> str:
        return f"{each.largest_tokens:,} tokens a rank" if each.largest_tokens else "none"

    both = f"{text(named)} with {named.strategy.name}, {text(advice.nothing)} with nothing"
    if not named.largest_tokens:
        return f"Largest micro-batch that fits: {both}."
    return (
        f"Largest micro-batch that fits: {both}. A rank then has {named.largest_rows:,} rows in a layer or less, which "
        f"max_rows_per_rank={named.largest_rows} guarantees for a plan."
    )


def break_even_text(advice: Advice) -> str:
    """From which skew on the strategy pays; "" if unknown."""
    if advice.break_even is None:
        return ""
    at, now = advice.break_even
    name = advice.target.outcomes[0].name
    if at.value <= 1.0:
        return f"Break-even: {name} saves {advice.least_gain:.0%} of a step or more at any skew of the routing."
    pays = "from" if at.value <= now else "only from"
    return (
        f"Break-even: {name} saves {advice.least_gain:.0%} of a step {pays} a max/mean of rank loads of {at.value:.2f} "
        f"on; here it is {now:.2f}."
    )


def limit_texts(advice: Advice) -> list[str]:
    """When the strategy fits and pays."""
    return [text for text in (ways_text(advice), micro_batch_text(advice), break_even_text(advice)) if text]


def advice_tiles(advice: Advice) -> list[tuple[str, str, str]]:
    """The main figures: what imbalance costs, what the advised strategy gains if enough was recorded, whether it fits,
    and how much was recorded."""
    static, target = advice.static.simulated, advice.target.outcomes[0].name
    cost = imbalance_cost(advice.nothing.step_s.value, advice.even_s)
    waiting = max(0.0, static.causes_s[WAITING] / static.step_time_s)
    named = next(each for each in advice.strategies if each.strategy.name == target)
    over = "" if named.over_eplb is None else f"; {named.over_eplb.value:.2f}x as fast as eplb"
    gain = [(f"Gain of {target}", f"{named.gain.value:.0%}", f"less time ({_range(named.gain)}){over}")]
    recorded = f"of each step recorded, {plural(advice.case.sequences.num_layers, 'layer')} simulated"
    return [
        ("Cost of imbalance", f"{cost:.0%}", f"of a step without balancing (of it, waiting {waiting:.0%})"),
        *([] if advice.case.is_too_small else gain),
        ("Memory", bytes_text(named.peak_bytes),
         f"of {bytes_text(advice.case.cluster.device_bytes)}: it {'fits' if named.fits else 'does not fit'}"),
        ("Basis", plural(advice.sequences, "sequence"), recorded + ("; too few" if advice.case.is_too_small else "")),
    ]  # fmt: skip


def advice_facts(advice: Advice) -> Facts:
    """What was simulated."""
    case, cluster = advice.case, advice.case.cluster
    steps = plural(case.measured, "step")
    chosen = case.sequences.num_layers
    groups = case.settings.groups
    in_groups = f" in {groups} groups" if groups > 1 else ""
    return (
        ("trace", f"{advice.source}: {steps}, {plural(advice.sequences, 'sequence')} or more recorded of each"),
        ("step", f"{int(case.sequences.lengths.sum()):,} tokens, {case.token_budget:,} or less a rank and micro-step"),
        ("model", f"{advice.model}; {chosen} of {advice.layers} recorded layers stand for {case.model.moe_layers}"),
        ("cluster", f"{plural(advice.gpus, 'GPU')}{in_groups}, {cluster.ranks_per_node} per node, {cluster.name}"),
        *layout_facts(case.settings),
        *slots_facts(case, {advice.chosen.strategy.name: advice.target.outcomes[0]}),
    )


def advice_notes(advice: Advice) -> list[str]:
    """Assumptions and limits."""
    texts = [scale_note(advice.case)]
    if advice.case.recorded is not None:
        texts.append(
            "Intervals hold two standard deviations of the recorded sequences and of "
            f"{plural(advice.draws, 'drawing')}, and the correction."
        )
    elif advice.case.measured > 1:
        texts.append("Intervals are the range of the steps.")
    if advice.missing:
        names = ", ".join(strategy.name for strategy in advice.missing)
        texts.append(f"The trace has one step: no history for eplb and no hit rate of a prediction. Left out: {names}.")
    elif advice.case.is_too_small:
        texts.append(f"No figure over eplb: with fewer than {LEAST_SEQUENCES} sequences it is chance.")
    if any(above_even(each.of_even) for each in advice.strategies):
        texts.append(f"Of even: {ABOVE_EVEN}.")
    return [*texts, "Step time is recompute and update, without the rollout.", ERROR_BAND]


def advice_output(advice: Advice) -> list[RenderableType]:
    """What `trimtab advise` prints."""
    shown = [*first_lines(advice.assumed), f"[bold]{escape(advice.answer)}[/bold]"]
    shown += [escape(text) for text in limit_texts(advice)]
    shown += ["", terminal_table(advice_table(advice)), terminal_table(cost_table(advice))]
    shown.append(terminal_table(waterfall_table(waterfall(advice), advice.static.simulated.step_time_s)))
    if lines := settings_to_copy(advice):
        shown.append("[bold]Settings[/bold]\n" + "\n".join(map(escape, lines)) + "\n")
    shown.append(terminal_facts(advice_facts(advice), "Setting"))
    shown.append("\n".join(map(escape, advice_notes(advice))))
    return shown


def advice_sections(advice: Advice) -> list[Section]:
    """The sections of the page, in order."""
    even = (
        "Speed-up is over doing nothing. Of even: step time with perfectly even routing, divided by this one. Memory "
        "is that of the rank that needs most; with an exclamation mark it does not fit."
    )
    causes = (
        "Waiting is what the step would be shorter if every expert phase took the ranks' mean time, with the same "
        "rows. The changes add up to the difference."
    )
    changes = waterfall(advice)
    found = [
        Section("figures", "Figures", "At a glance", tiles(advice_tiles(advice))),
        Section("strategies", "Strategies", "What a run can do", lead(even) + html_table(advice_table(advice))),
        Section("cost", "Cost", "What it saves, and what it needs", html_table(cost_table(advice))),
        Section("waterfall", "Waterfall", f"From static to {html_escape(changes[-1].name)}", lead(causes) + html_table(
            waterfall_table(changes, advice.static.simulated.step_time_s)
        )),
    ]  # fmt: skip
    if lines := settings_to_copy(advice):
        text = "".join(f"<pre>{html_escape(line)}</pre>" for line in lines)
        found.append(Section("settings", "Settings", "Settings to copy", text))
    if text := " ".join(limit_texts(advice)):
        found.append(Section("limits", "Limits", "When it fits and pays", summary(text)))
    found.append(Section("setting", "Setting", "Setting", facts(advice_facts(advice))))
    found.append(notes_section(advice_notes(advice)))
    return found
