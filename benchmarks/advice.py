"""`python -m benchmarks.advice`: how near scaled parts of steps come to whole steps, and how good `trimtab advise` is.

Scaling: sequences are taken from whole steps of synthetic routing, and scaled to them again. Speed-ups of `trimtab`
over `static` and `eplb` are compared with those of the whole steps. Held out: strategies are advised from some steps,
and judged in the next four, in which all of them are simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

import trimtab
from benchmarks.harness import Figures, main
from benchmarks.tables import figure_table
from trimtab.api.advise import DRAWS
from trimtab.api.run import Run
from trimtab.api.run_kinds import DISPATCHERS
from trimtab.api.steps import TraceSteps, read_steps
from trimtab.cli.options import add_options, positive
from trimtab.cli.parser import Parser
from trimtab.cluster import load_model
from trimtab.simulator.comparison_case import ComparisonCase
from trimtab.simulator.draws import Drawn, Estimate
from trimtab.simulator.strategies import ALL, EPLB, NOTHING, STRATEGIES, RunStrategy
from trimtab.trace import PRESETS, RoutingTrace, synthesize_preset
from trimtab.trace.store import open_trace

MODEL, MEAN_LENGTH, LONGEST, BUDGET = "qwen3-30b-a3b", 1024, 4096, 8192
# Scaling: presets, recorded sequences of a step, and the largest error that is allowed.
SCALED_PRESETS = ("qwen3-30b-math", "qwen3-30b-mixed")
BARS = {96: 0.04, 192: 0.03, 384: 0.02}
SCALED_LAYERS, SCALED_STEPS, SCALED_RANKS, SCALED_SEQUENCES = 4, 2, 16, 2048
INSIDE = 0.9
# Held out: presets, dispatchers, ranks and seeds; steps that are advised on and judged; parts that they are cut to.
HELD_PRESETS = ("qwen3-30b-math", "qwen3-30b-mixed", "nemotron-3-nano-text", "mixtral-8x7b-text", "uniform")
HELD_RANKS, HELD_SEEDS, HELD_LAYERS, ADVISED, JUDGED, HELD_MICRO_STEPS = (8, 16), (0, 1), 2, 3, 4, 6
CUTS, WITHIN = (0.2, 0.05), 0.02

RUN = Run(ranks=SCALED_RANKS, slots=2, token_budget=BUDGET, recompute_granularity="none")


def add_to(parser: Parser) -> None:
    """Add the options."""
    option = partial(add_options, parser, of=run_benchmark)
    option("--draws", type=positive, help="parts that are taken of each whole step")
    option("--cases", type=positive, help="held-out cases; a smaller number are the first of them")
    option("--cut-cases", type=positive, help="cases of them that are also cut to a fifth and a twentieth of a step")


def run_benchmark(draws: int = 10, cases: int = 40, cut_cases: int = 10) -> Figures:
    """All figures, as `--json` writes them."""
    return {
        "schema": "trimtab-bench-advice-1",
        "scaling": scaling(draws),
        "held_out": held_out(cases, cut_cases),
    }


def scaling(draws: int) -> Figures:
    """Errors of scaled steps, by preset and recorded sequences."""
    rows = []
    for preset in SCALED_PRESETS:
        trace = _trace(preset, SCALED_SEQUENCES, SCALED_LAYERS, SCALED_STEPS, seed=0)
        whole = read_steps(open_trace(trace), Run())
        tokens = int(trace.sequence_lengths[trace.steps == SCALED_STEPS - 1].sum())
        true = _speedups([_case(whole, RUN)])
        for sequences, draw in track([*product(BARS, range(draws))], f"scaling, {preset}", transient=True):
            part = read_steps(open_trace(_some(trace, sequences, draw)), Run(step_tokens=tokens))
            cases = [_case(part, RUN, seed=seed) for seed in range(DRAWS)]
            for name, found in _speedups(cases).items():
                rows.append(
                    {
                        "preset": preset, "sequences": sequences, "draw": draw, "over": name,
                        "true": true[name].value, "found": found.value, "interval": [found.low, found.high],
                    }
                )  # fmt: skip
    groups = [
        {"preset": preset, "sequences": sequences, "over": name} | _errors(mine, BARS[sequences])
        for preset, sequences, name in product(SCALED_PRESETS, BARS, ("static", "eplb"))
        if (
            mine := [row for row in rows if (row["preset"], row["sequences"], row["over"]) == (preset, sequences, name)]
        )
    ]
    return {"settings": {"draws": draws, "layers": SCALED_LAYERS, "tokens": tokens}, "summary": groups, "draws": rows}


def _errors(rows: Sequence[Mapping[str, Any]], bar: float) -> Figures:
    """Errors of the draws of one size, and how many have the truth in their interval."""
    errors = [abs(row["found"] / row["true"] - 1) for row in rows]
    inside = sum(row["interval"][0] <= row["true"] <= row["interval"][1] for row in rows)
    return {
        "mean_error": float(np.mean(errors)),
        "worst_error": max(errors),
        "bias": float(np.mean([row["found"] / row["true"] - 1 for row in rows])),
        "bar": bar,
        "within_bar": sum(error <= bar for error in errors),
        "inside": inside,
        "draws": len(rows),
    }


def _speedups(cases: Sequence[ComparisonCase]) -> dict[str, Estimate]:
    """Speed-ups of `trimtab` over `static` and `eplb`."""
    drawn = {each.name: Drawn(tuple(each.simulate(case) for case in cases)) for each in (NOTHING, EPLB, ALL)}
    return {
        "static": drawn[ALL.name].speedup(drawn[NOTHING.name]),
        "eplb": drawn[ALL.name].speedup(drawn[EPLB.name]),
    }


def _case(steps: TraceSteps, run: Run, seed: int = 0) -> ComparisonCase:
    return steps.case(run, load_model(MODEL), seed=seed)


def _some(trace: RoutingTrace, sequences: int, seed: int) -> RoutingTrace:
    """So many sequences of every step."""
    rng, steps = np.random.default_rng(seed), np.unique(trace.steps)
    chosen = [np.sort(rng.choice(np.flatnonzero(trace.steps == step), sequences, False)) for step in steps]
    return trace.select(np.concatenate(chosen))


def _trace(preset: str, sequences: int, layers: int, steps: int, seed: int) -> RoutingTrace:
    return synthesize_preset(
        PRESETS[preset], num_sequences=sequences, mean_length=MEAN_LENGTH, max_length=LONGEST, num_layers=layers,
        num_experts=128, top_k=8, num_steps=steps, seed=seed,
    )  # fmt: skip


def held_out(count: int, cut_count: int) -> Figures:
    """What was advised in each case, and how it does in the steps after."""
    settings = [*product(HELD_SEEDS, HELD_PRESETS, DISPATCHERS, HELD_RANKS)][:count]
    rows = []
    for number, (seed, preset, dispatcher, ranks) in enumerate(track(settings, "held out", transient=True)):
        sequences = ranks * HELD_MICRO_STEPS * BUDGET // MEAN_LENGTH
        trace = _trace(preset, sequences, HELD_LAYERS, ADVISED + JUDGED, seed=100 + seed)
        known = trace.select(np.flatnonzero(trace.steps < ADVISED))
        run = replace(RUN, ranks=ranks, dispatcher=dispatcher, slots="auto")
        verdict = trimtab.advise(known, run).advice
        judged = _case(read_steps(open_trace(trace), Run(steps=JUDGED)), replace(run, slots=2))
        times_s = {each.name: each.simulate(judged).simulated.step_time_s for each in STRATEGIES}
        best = min(times_s, key=lambda name: times_s[name])
        chosen: RunStrategy = verdict.chosen.strategy
        tokens = int(known.sequence_lengths.sum()) // ADVISED
        row: Figures = {
            "case": f"{preset}, {dispatcher}, {ranks} ranks, seed {seed}", "verdict": verdict.verdict,
            "advised": chosen.name, "best": best, "behind": times_s[chosen.name] / times_s[best] - 1,
            "judged_s": times_s,
        }  # fmt: skip
        if number % max(1, len(settings) // cut_count) == 0:
            parts = {cut: _some(known, round(cut * sequences), 0) for cut in CUTS}
            sized = replace(run, step_tokens=tokens)
            cuts = {cut: trimtab.advise(part, sized).advice for cut, part in parts.items()}
            row["cut"] = {str(cut): each.verdict for cut, each in cuts.items()}
            row["cut_behind"] = {
                str(cut): times_s[each.chosen.strategy.name] / times_s[best] - 1 for cut, each in cuts.items()
            }
        rows.append(row)
    cut_rows = [row for row in rows if "cut" in row]
    pairs = [(row, cut) for row in cut_rows for cut in row["cut"]]
    same = [row["cut"][cut] in (row["verdict"], "too few sequences") for row, cut in pairs]
    return {
        "settings": {"layers": HELD_LAYERS, "advised_steps": ADVISED, "judged_steps": JUDGED, "cuts": list(CUTS)},
        "within": sum(row["behind"] <= WITHIN for row in rows),
        "worst": max(row["behind"] for row in rows),
        "cases": len(rows),
        "cuts_same_or_too_few": sum(same),
        "cuts_within_or_too_few": sum(
            row["cut"][cut] == "too few sequences" or row["cut_behind"][cut] <= WITHIN for row, cut in pairs
        ),
        "cut_verdicts": len(same),
        "by_case": rows,
    }


def print_figures(figures: Figures, console: Console) -> None:
    """Print the tables."""
    columns = {
        "preset": "{preset}", "sequences": "{sequences}", "over": "{over}", "worst error": "{worst_error:.1%}",
        "bias": "{bias:+.1%}", "in bar": "{within_bar} of {draws}", "in interval": "{inside} of {draws}",
    }  # fmt: skip
    console.print(
        figure_table("Speed-up of trimtab, scaled against whole steps", columns, figures["scaling"]["summary"])
    )
    held = figures["held_out"]
    console.print(
        f"Held out: within {WITHIN:.0%} of the best strategy in {held['within']} of {held['cases']} cases, at most "
        f"{held['worst']:.1%} behind; cut, the same verdict or too few sequences in {held['cuts_same_or_too_few']} of "
        f"{held['cut_verdicts']}, and within {WITHIN:.0%} or too few in {held['cuts_within_or_too_few']}."
    )


if __name__ == "__main__":
    main("benchmarks.advice")
