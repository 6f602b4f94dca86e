"""`python -m experiments.simulated`: the simulated steps of docs/results.md, docs/start.md and docs/simulator.md.

Steps of synthetic traces on 16 H100 ranks, with both kinds of dispatcher and all balancers; of the first trace also a
sweep, other taxes of transfers and the assumptions of `simulate --sensitivity`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

import trimtab
from benchmarks.harness import main, show
from experiments.page_tables import markdown_table, replace_tables
from trimtab.analysis.summary import answer as analysis_answer
from trimtab.analysis.summary import cost_summary
from trimtab.api.simulate import MAIN_POLICIES
from trimtab.cli.options import add_options
from trimtab.cli.parser import Parser
from trimtab.cluster import load_cluster
from trimtab.cluster.spec_files import write_cluster
from trimtab.report.simulation import answer
from trimtab.trace import PRESETS, RoutingTrace, synthesize_preset

EXAMPLES = ("--json out/simulated.json",)
ROOT = Path(__file__).parents[1]
START, RESULTS, SIMULATOR = (ROOT / "docs" / f"{name}.md" for name in ("start", "results", "simulator"))
# Steps of each trace, the first of which is not simulated.
TRACES = {"qwen3-30b-math": 2, "drift": 4, "nemotron-3-nano-text": 2}
KINDS = {
    "qwen3-30b-math": "persistent: the same experts are hot in every step",
    "permuted": "the same with expert ids in random order",
    "drift": "drift: hot experts change between steps (synthetic)",
    "nemotron-3-nano-text": "mild: the skew of general text",
}
SIZE: dict[str, Any] = {"num_sequences": 2048, "mean_length": 1024, "max_length": 4096, "num_layers": 8}
STEP: dict[str, Any] = {
    "cluster": "h100x8",
    "ranks": 16,
    "slots": "auto",
    "micro_steps": 32,
    "recompute_granularity": "full",
}
SWEEP: dict[str, Any] = {"ranks": [8, 16, 32], "slots": [2, "auto"], "micro_steps": [8, 32]}
# Parts of transfers' seconds that they take from compute.
TAXES = (0.0, 0.15, 0.3, 0.5)
DISPATCHERS = ("tokens", "rows")
# Figures of a balancer that are stored.
KEPT = (
    "step_time_s", "speedup_vs_static", "speedup_vs_eplb", "fraction_of_balanced", "replicas_per_instance",
    "cross_node_token_fraction", "peak_bytes_per_rank", "fits", "slots_per_rank", "first_moves_s", "chosen",
)  # fmt: skip
ABOUT = {
    "trimtab": "one plan per micro-step and layer, made during rollout and step",
    "eplb_oracle": "EPLB that knows the step's total loads",
    "eplb": "EPLB from the steps before",
    "static": "plain expert parallelism",
}


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--pages", action="store_true", help="put the tables into the pages")


def run(options: argparse.Namespace) -> None:
    """Run the command with its options."""
    figures = simulate_all(TRACES, SIZE, SWEEP)
    show(figures, print_figures, options.json)
    if options.pages:
        write_pages(figures)


def simulate_all(traces: Mapping[str, int], size: Mapping[str, int], sweep: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of all balancers on each trace, by dispatcher; and what else is simulated of the first one."""
    steps: dict[str, Any] = {}
    for name, num_steps in traces.items():
        trace = synthesize_preset(PRESETS[name], num_experts=128, top_k=8, num_steps=num_steps, **size)
        is_first = not steps
        result = trimtab.simulate(trace, _runs(dispatcher=DISPATCHERS), policies="all", sensitivity=is_first)
        cases = zip(DISPATCHERS, result.figures()["sweep"], result.cases, strict=True)
        steps[name] = {sent: {"answer": answer(simulated)} | _kept(case) for sent, case, simulated in cases}
        if is_first:
            sensitivity = dict(zip(DISPATCHERS, (case.sensitivity for case in result.cases), strict=True))
            analysis = _analysis_text(trace)
            swept = trimtab.simulate(trace, _runs(**sweep), policies="all").figures()
            taxed = _taxed(trace)
    return {
        "yardstick": swept["yardstick"],
        "size": dict(size),
        "num_steps": dict(traces),
        "step": STEP,
        "analysis": analysis,
        "steps": steps,
        "sensitivity": {sent: [asdict(row) for row in rows] for sent, rows in sensitivity.items()},
        "sweep": [
            {name: case[name] for name in ("ranks", "slots", "micro_steps")} | _kept(case) for case in swept["sweep"]
        ],
        "taxed": taxed,
    }


def _runs(**values: Sequence[Any]) -> tuple[trimtab.Run, ...]:
    return trimtab.Run(model="qwen3-30b-a3b", **STEP).sweep(**values)


def _taxed(trace: RoutingTrace) -> list[dict[str, Any]]:
    """Seconds of a step, and slots, if transfers take another part of their seconds from compute."""
    found = []
    with TemporaryDirectory() as folder:
        for tax in TAXES:
            spec = replace(load_cluster(STEP["cluster"], ranks=STEP["ranks"]), transfer_tax=tax)
            path = Path(folder) / "nodes.toml"
            write_cluster(path, spec, {"transfer_tax": "varied"}, base=STEP["cluster"])
            runs = _runs(cluster=[path], slots=[2, "auto"], dispatcher=DISPATCHERS)
            result = trimtab.simulate(trace, runs, policies=MAIN_POLICIES)
            for case in result.cases:
                each = case.outcomes
                found.append(
                    {
                        "tax": tax, "dispatcher": case.dispatcher, "slots": case.slots,
                        "step_time_s": {name: outcome.simulated.step_time_s for name, outcome in each.items()},
                        "slots_per_rank": {name: outcome.plan.slots_per_rank for name, outcome in each.items()},
                    }
                )  # fmt: skip
    return found


def _analysis_text(trace: RoutingTrace) -> str:
    analysis = trimtab.analyze(trace, trimtab.Run(ranks=STEP["ranks"], model="qwen3-30b-a3b")).analysis
    return f"{analysis_answer(analysis)} {cost_summary(analysis)}"


def print_figures(figures: Mapping[str, Any], console: Console) -> None:
    """Print the tables as they stand on the pages."""
    console.print(*blocks(figures).values(), sep="\n\n", markup=False, soft_wrap=True)


def _kept(case: Mapping[str, Any]) -> dict[str, Any]:
    policies = {
        name: {key: figures[key] for key in KEPT} | {"max_over_mean": figures["max_over_mean"]["mean"]}
        for name, figures in case["policies"].items()
    }
    return {"policies": policies, "permuted_s": case["ids_permuted"]["step_time_s"]}


def blocks(figures: Mapping[str, Any]) -> dict[str, str]:
    """The generated parts of both pages, by name."""
    return {
        "gain": _gain(figures),
        "analysis": f"> {figures['analysis']}",
        "answer": "> " + next(iter(figures["steps"].values()))[DISPATCHERS[0]]["answer"],
        "balancers": _balancers(figures),
        "kinds": _kinds(figures["steps"]),
        "sweep": _sweep(figures["sweep"]),
        "taxed": _taxes(figures["taxed"]),
        **{f"sensitivity-{sent}": _sensitivity(figures["sensitivity"][sent]) for sent in DISPATCHERS},
    }


def write_pages(figures: Mapping[str, Any]) -> None:
    """Put the generated parts into the pages."""
    made = blocks(figures)
    replace_tables({name: made.pop(name) for name in ("analysis", "answer")}, START)
    replace_tables({name: made.pop(name) for name in [*made] if name.startswith("sensitivity")}, SIMULATOR)
    replace_tables(made, RESULTS)


def _gain(figures: Mapping[str, Any]) -> str:
    """Four balancers with both dispatchers on the first trace, and who is faster where."""
    skewed = next(iter(figures["steps"].values()))
    rows = [
        [f"`{name}`: {about}", *(cell for sent in DISPATCHERS for cell in _speeds(skewed[sent]["policies"][name]))]
        for name, about in ABOUT.items()
    ]
    header = ["balancer"]
    for sent in DISPATCHERS:
        header += [f"{sent} sent: step", "over `static`", "over `eplb`"]
    notes = [
        "`tokens`: the dispatcher sends a token to a node once, as DeepEP, HybridEP and MoRI do. `rows`: it sends "
        "every row to its rank, as an all-to-all does.",
        _lost(figures["sweep"]),
    ]
    return "\n".join([markdown_table(header, rows), "", *(f"* {note}" for note in notes)])


def seconds_by_kind(steps: Mapping[str, Any], sent: str) -> dict[str, dict[str, float]]:
    """Seconds of a step by balancer that fits for each of `KINDS`, with one dispatcher."""
    found = {}
    for name, by_sent in steps.items():
        policies = by_sent[sent]["policies"]
        found[name] = {each: policy["step_time_s"] for each, policy in policies.items() if policy["fits"]}
    return found | {"permuted": next(iter(steps.values()))[sent]["permuted_s"]}


def _kinds(steps: Mapping[str, Any]) -> str:
    """What `trimtab` gains with each kind of routing, and over whom."""
    by_sent = {sent: seconds_by_kind(steps, sent) for sent in DISPATCHERS}
    header, rows = ["routing"], []
    for sent in DISPATCHERS:
        header += [f"{sent} sent: over `static`", "over `eplb`", "over the best other"]
    for kind, about in KINDS.items():
        row = [about]
        for sent in DISPATCHERS:
            seconds = by_sent[sent][kind]
            row += [f"{seconds[than] / seconds['trimtab']:.2f}x" for than in ("static", "eplb")]
            others = {name: each_s for name, each_s in seconds.items() if name not in ("trimtab", "balanced")}
            best = min(others, key=lambda name: others[name])
            row.append("" if kind == "permuted" else f"{others[best] / seconds['trimtab']:.3f}x (`{best}`)")
        rows.append(row)
    return markdown_table(header, rows)


def _sensitivity(rows: Sequence[Mapping[str, Any]]) -> str:
    """Seconds of the best balancers under other assumptions."""
    names = [*rows[0]["step_time_s"]]
    body = []
    for row in rows:
        seconds = row["step_time_s"]
        best = min(seconds[name] for name in names if name != "trimtab")
        cells = [f"{seconds[name]:.2f} s" for name in names]
        body.append([f"{row['name']}: {row['about']}", *cells, f"{best / seconds['trimtab']:.2f}x"])
    return markdown_table(["assumption", *(f"`{name}`" for name in names), "over the best other"], body)


def _speeds(policy: Mapping[str, Any]) -> list[str]:
    return [f"{policy['step_time_s']:.2f} s", *(f"{policy[f'speedup_vs_{than}']:.2f}x" for than in ("static", "eplb"))]


def _lost(sweep: Sequence[Mapping[str, Any]]) -> str:
    """The cases of the sweep in which another balancer is faster."""
    texts = []
    for case in sweep:
        policies = {name: figures for name, figures in case["policies"].items() if name != "balanced"}
        fastest = min(policies, key=lambda name: policies[name]["step_time_s"])
        if fastest != "trimtab":
            less = 1 - policies[fastest]["step_time_s"] / policies["trimtab"]["step_time_s"]
            memory = f" (with {policies[fastest]['peak_bytes_per_rank'] / 1e9:.0f} GB a rank, which do not fit)"
            texts.append(
                f"`{fastest}` takes {less:.1%} less time at {_place(case)}{'' if policies[fastest]['fits'] else memory}"
            )
    others = "; ".join(texts) if texts else "in none"
    return f"Other balancers are faster in {len(texts)} of {len(sweep)} cases of 8 to 32 ranks (tokens): {others}."


def _taxes(cases: Sequence[Mapping[str, Any]]) -> str:
    """Seconds of `trimtab` and `eplb` by tax and slots."""
    rows = []
    for case in cases:
        seconds, slots = case["step_time_s"], case["slots_per_rank"]
        both = (f"{seconds[name]:.2f} s ({slots[name]} slots)" for name in ("trimtab", "eplb"))
        rows.append([f"{case['tax']:g}", case["dispatcher"], str(case["slots"]), *both])
    return markdown_table(["transfer_tax", "sent", "slots", "`trimtab`", "`eplb`"], rows)


def _place(case: Mapping[str, Any]) -> str:
    slots = f"{case['slots']} slots"
    return f"{case['ranks']} ranks, {slots}, {case['micro_steps']} micro-steps"


def _balancers(figures: Mapping[str, Any]) -> str:
    """All balancers on the first trace; those of the other dispatcher and traces in seconds."""
    names = {name: about.partition(":")[0] for name, about in KINDS.items()}
    first, *others = (
        (name, sent, cases[sent]["policies"]) for name, cases in figures["steps"].items() for sent in DISPATCHERS
    )
    header = ["balancer", "step", "over `static`", "over `eplb`", "first moves"]
    header += ["of ideal", "max/mean", "replicas", "memory", *(f"{names[name]}, {sent}" for name, sent, _ in others)]
    rows = [
        [
            f"`{name}`", *_speeds(policy), f"{policy['first_moves_s']:.2f} s", f"{policy['fraction_of_balanced']:.1%}",
            f"{policy['max_over_mean']:.3f}", f"{policy['replicas_per_instance']:.1f}",
            f"{policy['peak_bytes_per_rank'] / 1e9:.1f} GB",
            *(f"{more[name]['step_time_s']:.2f} s" for _, _, more in others),
        ]
        for name, policy in sorted(first[2].items(), key=lambda item: item[1]["step_time_s"])
    ]  # fmt: skip
    far = first[2]["trimtab"]["cross_node_token_fraction"]
    return f"{markdown_table(header, rows)}\n\nOf the rows of `trimtab`, {far:.0%} go to another node."


def _sweep(sweep: Sequence[Mapping[str, Any]]) -> str:
    """Seconds of every case."""
    rows = []
    for case in sweep:
        policies = case["policies"]
        real = {name: policy for name, policy in policies.items() if name != "balanced"}
        fitting = {name: policy for name, policy in real.items() if policy["fits"]}
        fastest = min(fitting, key=lambda name: fitting[name]["step_time_s"], default=None)
        seconds = {name: f"{policy['step_time_s']:.1f}" for name, policy in policies.items()}
        names = ("trimtab", "eplb", "static", "balanced")
        size = [str(case[name]) for name in ("ranks", "slots", "micro_steps")]
        fits = "yes" if policies["trimtab"]["fits"] else "no"
        rows.append(
            [*size, f"`{fastest}` {seconds[fastest]}" if fastest else "none", fits, *(seconds[name] for name in names)]
        )
    header = ["ranks", "slots", "micro-steps", "fastest that fits", "`trimtab` fits"]
    return markdown_table([*header, "`trimtab`", "`eplb`", "`static`", "`balanced`"], rows)


if __name__ == "__main__":
    main("experiments.simulated")
