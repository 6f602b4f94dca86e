"""`trimtab.advise`: what to do about imbalance on a cluster, what it gains, whether it fits, and what it saves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from trimtab.api.result_summary import Summarised
from trimtab.api.run import Run, checked
from trimtab.api.steps import read_steps, spread_layers
from trimtab.cluster.parallel_layout import GRANULARITIES
from trimtab.figures import plural
from trimtab.kinds import positive, price
from trimtab.report.advice import Advice, StrategyFigures
from trimtab.report.html import write_html
from trimtab.report.imbalance import Imbalance
from trimtab.report.number_text import seconds
from trimtab.simulator.comparison import Outcome, fits, simulate_policy, with_slots_of
from trimtab.simulator.comparison_case import ComparisonCase
from trimtab.simulator.draws import Drawn, break_even
from trimtab.simulator.memory import largest_micro_batch
from trimtab.simulator.step import imbalance_cost
from trimtab.simulator.strategies import ALL, EPLB, NOTHING, STRATEGIES, RunStrategy
from trimtab.trace import RoutingTrace
from trimtab.trace.store import Source, open_trace

# Layers and steps that are simulated, and drawings of scaled steps.
MOST_LAYERS, MOST_STEPS, DRAWS = 8, 2, 2
# The first answer has these, and the balancer of even routing.
FIRST, EVEN = (NOTHING, EPLB, ALL), "balanced"
# A strategy pays if it saves this part of the step; of those that are this near the fastest, the simplest is advised.
LEAST_GAIN, ABOUT_AS_FAST = 0.03, 0.01


@dataclass(frozen=True, eq=False, repr=False)
class AdviceResult(Summarised):
    """Strategies for a run, sorted by seconds, and the one that is advised.

    Attributes:
        source: name of the trace's file or files.
        advice: all figures; `Advice` documents them.
        trace: the last step, as recorded, with the layers that were simulated.
        outcomes: plan, simulated step and memory of each strategy, of the first drawing.
    """

    source: str
    advice: Advice
    trace: RoutingTrace
    outcomes: dict[str, Outcome]

    def figures(self) -> dict[str, Any]:
        """What `trimtab advise --json` writes."""
        return {"schema": "trimtab-advise-1", "trace": self.source} | self.advice.figures()

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page of `trimtab advise --html`. Writes are atomic."""
        write_html(self.advice, path, self.figures())

    @property
    def imbalance(self) -> Imbalance:
        """Of the last step: `nothing`, and the strategy that is advised or gains most."""
        advice = self.advice
        names = (NOTHING.name, (advice.best if advice.chosen.strategy is NOTHING else advice.chosen).strategy.name)
        loads = {name: self.outcomes[name].simulated.work.loads_MLR for name in names}
        return Imbalance(loads, self.trace.layer_indices, int(self.trace.steps[0]), self.trace.top_k)

    def summary(self) -> Sequence[str]:
        advice = self.advice
        size = f"{advice.model}, {plural(advice.gpus, 'GPU')} of {advice.cluster}"
        return f"{self.source}, {size}", advice.assumed, advice.answer


def advise(
    trace: RoutingTrace | Source,
    run: Run = Run(),  # noqa: B008
    *,
    gpu_hour: Annotated[float | None, price] = None,
    draws: Annotated[int, positive] = DRAWS,
    first: Callable[[str], None] = lambda text: None,
    progress: Callable[[str, int, int], None] = lambda strategy, done, total: None,
) -> AdviceResult:
    """Compare what a training run can do about imbalance on a cluster (nothing, packing, moving experts, EPLB, live and
    planned replicas), and advise one: seconds with intervals, GPU hours, memory, what it needs, and settings to copy.
    Traces that have a part of each step are scaled to the step.

    At most 8 layers, evenly chosen by their imbalance, stand for the model.

    Args:
        trace: as in `simulate`.
        run: the run.
        gpu_hour: price of an hour of one GPU; by default no money.
        draws: drawings of steps of which a part was recorded.
        first: called with a first answer, from one drawing of `static`, `eplb`, `trimtab` and even routing.
        progress: called before each strategy with its name, the simulations done and all, and once at the end.

    Raises:
        InputError: as `simulate`.
    """
    checked(advise, {"gpu_hour": gpu_hour, "draws": draws})
    reader = open_trace(trace)
    run = run.on_ranks(reader)
    spec = run.model_of(reader)
    run.settings(spec), run.nodes
    recorded = read_steps(reader, run, most=MOST_STEPS)
    sequences, layers = recorded.sequences, recorded.last.num_layers
    recorded = recorded.with_layers(spread_layers(recorded, run.nodes.ranks, MOST_LAYERS))
    first_case = recorded.case(run, spec)
    # Later drawings have the checkpointing of the first.
    names = {kept: name for name, kept in GRANULARITIES.items()}
    run = replace(run, recompute_granularity=names[first_case.settings.checkpointing])
    draws = draws if first_case.halves else 1
    cases = [first_case, *(recorded.case(run, spec, seed=seed) for seed in range(1, draws))]
    possible = [strategy for strategy in STRATEGIES if not strategy.needs_past or first_case.earlier]
    total = draws * (len(possible) + 1) + 1
    drawn = _simulated(cases, possible, first, lambda name, done: progress(name, done, total))
    case, gpus = cases[0], first_case.cluster.ranks * run.groups * run.pp
    even_s = drawn.pop(EVEN).step_s.value
    figures = [_figures(strategy, drawn, case, even_s, gpus, gpu_hour) for strategy in possible]
    progress("break-even", total - 1, total)
    chosen = _choose(figures)
    best = min((each for each in figures if each.strategy is not NOTHING), key=lambda each: each.step_s.value)
    target = best if chosen.strategy is NOTHING else chosen
    pays_from = (
        None
        if case.is_too_small
        else break_even(with_slots_of(case, drawn[target.strategy.name].outcomes[0]), target.strategy, LEAST_GAIN)
    )
    progress("break-even", total, total)
    advice = Advice(
        strategies=tuple(sorted(figures, key=lambda each: each.step_s.value)),
        chosen=chosen,
        best=best,
        missing=tuple(strategy for strategy in STRATEGIES if strategy not in possible),
        static=drawn[NOTHING.name],
        target=drawn[target.strategy.name],
        even_s=even_s,
        case=case,
        source=recorded.name,
        sequences=sequences,
        layers=layers,
        gpus=gpus,
        draws=draws,
        break_even=pays_from,
        gpu_hour=gpu_hour,
        least_gain=LEAST_GAIN,
    )
    return AdviceResult(recorded.name, advice, recorded.last, {name: each.outcomes[0] for name, each in drawn.items()})


def _simulated(
    cases: Sequence[ComparisonCase],
    strategies: Sequence[RunStrategy],
    first: Callable[[str], None],
    progress: Callable[[str, int], None],
) -> dict[str, Drawn]:
    """Outcomes of the strategies and of even routing (`EVEN`), by name. The first answer is given from the first case.

    Args:
        progress: called before each simulation with its name and the simulations done.
    """
    order = {each.name: each.simulate for each in FIRST if each in strategies}
    order[EVEN] = lambda case: simulate_policy(case, EVEN)
    order |= {each.name: each.simulate for each in strategies if each not in FIRST}
    found: dict[str, list[Outcome]] = {name: [] for name in order}
    for case in cases:
        for done, (name, simulate) in enumerate(order.items(), sum(map(len, found.values()))):
            progress(name, done)
            first_of = found[name][0] if found[name] else None
            found[name].append(simulate(with_slots_of(case, first_of) if first_of else case))
            if name == EVEN and case is cases[0]:
                known = {each: outcomes[0] for each, outcomes in found.items() if outcomes and each != EVEN}
                first(_first_answer(known, found[EVEN][0], case))
    return {name: Drawn(tuple(outcomes)) for name, outcomes in found.items()}


def _figures(
    strategy: RunStrategy,
    drawn: dict[str, Drawn],
    case: ComparisonCase,
    even_s: float,
    gpus: int,
    gpu_hour: float | None,
) -> StrategyFigures:
    mine, outcome = drawn[strategy.name], drawn[strategy.name].outcomes[0]
    step_s, settings = mine.step_s, case.settings
    tokens, rows = largest_micro_batch(
        outcome.load, case.model, case.cluster.device_bytes, groups=settings.groups, sharding=settings.sharding,
        checkpointing=settings.checkpointing, layout=settings.layout,
    )  # fmt: skip
    hours = step_s.value * gpus * 1000 / 3600
    return StrategyFigures(
        strategy=strategy,
        step_s=step_s,
        speedup=mine.speedup(drawn[NOTHING.name]),
        over_eplb=mine.speedup(drawn[EPLB.name]) if EPLB.name in drawn and case.knows_past else None,
        of_even=even_s / step_s.value,
        peak_bytes=outcome.peak_bytes,
        fits=fits(case, outcome),
        gpu_hours=hours,
        money=None if gpu_hour is None else hours * gpu_hour,
        hit_rate=outcome.hit_rate,
        largest_tokens=tokens,
        largest_rows=rows,
    )


def _choose(figures: list[StrategyFigures]) -> StrategyFigures:
    """The simplest that is about as fast as the fastest that fits; doing nothing if that gains too little."""
    nothing = next(each for each in figures if each.strategy is NOTHING)
    fitting = [each for each in figures if each.fits] or figures
    least_s = min(each.step_s.value for each in fitting)
    if nothing in fitting and least_s > (1 - LEAST_GAIN) * nothing.step_s.value:
        return nothing
    return next(each for each in fitting if each.step_s.value <= (1 + ABOUT_AS_FAST) * least_s)


def _first_answer(outcomes: Mapping[str, Outcome], even: Outcome, case: ComparisonCase) -> str:
    """A first answer, from one drawing."""
    static = outcomes[NOTHING.name].simulated
    parts = [f"nothing {seconds(static.step_time_s)}"]
    parts += [
        f"{name} {seconds(outcome.simulated.step_time_s)}" for name, outcome in outcomes.items() if name != "nothing"
    ]
    parts.append(f"even routing {seconds(even.simulated.step_time_s)}")
    few = " (too few sequences to compare)" if case.is_too_small else ""
    cost = imbalance_cost(static.step_time_s, even.simulated.step_time_s)
    return f"first answer: a step takes {', '.join(parts)}{few}; imbalance costs {cost:.0%}"
