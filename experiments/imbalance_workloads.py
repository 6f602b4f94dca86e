"""`python -m experiments.imbalance_workloads`: simulated workloads W0 to W7 of Megatron-LM's token-imbalance benchmark.

Steps of each on 16 H100 ranks, with both kinds of dispatcher and all balancers.

From the benchmark (NVIDIA/Megatron-LM, pull request 7488, `benchmarks/moe/token_imbalance`, September 2026): names; the
pools that experts are drawn from, and which tokens draw from them (`pool_of`); exactly top-k distinct experts a token;
routing that depends on workload, seed and step alone, seeded by the same digest. W1 and W2 have the same definition
there and differ in their random numbers alone. W3 has a wider pool than W1, every other expert, so its experts are less
hot. Every workload's ranks have the same number of tokens, also those of W4, which is named after ragged ones.

Ours: random numbers of numpy, so ids are not those of the benchmark (`trimtab trace import` reads its traces); tokens
and layers are drawn independently, where the benchmark has one layer and the same ids on all ranks; sizes. A source,
the tokens of a rank in a micro-step there, is a sequence. Sources of W4 have 0.25 to 1.75 times the mean tokens.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import trimtab
from benchmarks.harness import main, show
from experiments.page_tables import markdown_table, replace_tables
from trimtab.array_type import Array
from trimtab.cli.options import add_options
from trimtab.cli.parser import Parser
from trimtab.errors import InputError
from trimtab.kernels import kernel
from trimtab.simulator.yardstick import yardstick
from trimtab.trace import RoutingTrace

EXAMPLES = ("--json docs/benchmarks/imbalance-workloads.json --pages",)
RESULTS = Path(__file__).parents[1] / "docs" / "results.md"
WORKLOADS = (
    "W0_balanced", "W1_hot_expert_set", "W2_hot_rank", "W3_spread_hot_experts", "W4_source_ragged",
    "W5_zero_expert_rank", "W6_rotating_hotspot", "W7_burst",
)  # fmt: skip
# The first step is not simulated. The others have two periods of W7, and three hot sets of W6.
SIZE: dict[str, int] = {"sources": 64, "mean_tokens": 4096, "num_layers": 2, "num_steps": 9, "seed": 1234}
EXPERTS: dict[str, int] = {"num_experts": 128, "top_k": 8}
STEP: dict[str, Any] = {"cluster": "h100x8", "ranks": 16, "slots": 2, "micro_steps": 4, "recompute_granularity": "full"}
DISPATCHERS = ("tokens", "rows")
TRIMTAB, IDEAL = "trimtab", "balanced"
# Figures of a balancer that are stored.
KEPT = ("step_time_s", "step_times_s", "first_moves_s", "replicas_per_instance", "slots_per_rank", "fits", "chosen")
# The largest ratio to the best other balancer, minus 1, that counts as even.
EVEN = 0.005


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--pages", action="store_true", help="put the table into docs/results.md")


def run(options: argparse.Namespace) -> None:
    """Run the command with its options."""
    figures = simulate_all(WORKLOADS)
    show(figures, print_figures, options.json)
    if options.pages:
        replace_tables(blocks(figures), RESULTS)


def pool_of(workload: str, step: int, num_experts: int, top_k: int) -> tuple[Array, tuple[bool, ...]]:
    """Experts that are hot in a step, and which of four consecutive tokens draw from them; the others draw from all.

    Raises:
        InputError: for the name of no workload that draws.
    """
    hot = np.arange(max(top_k, num_experts // 4))
    never, always, mostly = (False,) * 4, (True,) * 4, (False, True, True, True)
    match workload:
        case "W1_hot_expert_set" | "W2_hot_rank":
            return hot, mostly
        case "W3_spread_hot_experts":
            return np.unique(2 * np.arange(max(top_k, num_experts // 2)) % num_experts), mostly
        case "W4_source_ragged":
            return hot, never
        case "W5_zero_expert_rank":
            return np.arange(num_experts // 2, num_experts), always
        case "W6_rotating_hotspot":
            return (hot + step // 3 * len(hot)) % num_experts, mostly
        case "W7_burst":
            return hot, (True, False, True, False) if step % 4 == 3 else never
    raise InputError(f"{workload}: expected one of {', '.join(WORKLOADS)}")


def trace_of(
    workload: str, *, sources: int, mean_tokens: int, num_layers: int, num_steps: int, num_experts: int, top_k: int,
    seed: int,
) -> RoutingTrace:  # fmt: skip
    """Routing of a workload. Every step has a sequence for each source."""
    spread = np.linspace(0.25, 1.75, sources) if workload == "W4_source_ragged" else np.ones(sources)
    lengths = np.rint(mean_tokens * spread).astype(int).tolist()
    sequences: list[Array] = []
    for step in range(num_steps):
        digest = hashlib.sha256(f"{workload}|{seed}|{step}".encode()).hexdigest()
        rng = np.random.default_rng(int(digest[:8], 16))
        for length in lengths:
            layers = [
                _draw_ids(workload, step, length, num_experts, top_k, rng).astype(np.uint16) for _ in range(num_layers)
            ]
            sequences.append(np.stack(layers, axis=1))
    return RoutingTrace.from_sequences(
        sequences, num_experts=num_experts, steps=np.repeat(np.arange(num_steps), sources), domains=workload
    )


def _draw_ids(workload: str, step: int, tokens: int, num_experts: int, top_k: int, rng: np.random.Generator) -> Array:
    """`[tokens, K]`, distinct in every row: those of a source in one layer."""
    if workload == "W0_balanced":
        return np.arange(tokens * top_k).reshape(tokens, top_k) % num_experts
    pool, which = pool_of(workload, step, num_experts, top_k)
    hot_T = np.resize(which, tokens)
    ids_TK = np.empty((tokens, top_k), np.int64)
    for experts, rows_T in ((pool, hot_T), (np.arange(num_experts), ~hot_T)):
        ids_TK[rows_T] = _distinct(experts, rng.random((int(rows_T.sum()), top_k)))
    return ids_TK


@kernel
def _distinct(experts_P, random_TK):  # type: ignore[no-untyped-def]
    """`[T, K]`: K distinct ones of the experts for every token; the first K places of a shuffle."""
    order_P = experts_P.copy()
    ids_TK = np.empty(random_TK.shape, np.int64)
    for t in range(len(ids_TK)):
        for k in range(ids_TK.shape[1]):
            other = k + int(random_TK[t, k] * (len(order_P) - k))
            order_P[k], order_P[other] = order_P[other], order_P[k]
            ids_TK[t, k] = order_P[k]
    return ids_TK


def simulate_all(
    workloads: Sequence[str],
    size: Mapping[str, int] = SIZE,
    step: Mapping[str, Any] = STEP,
    policies: str | Sequence[str] = "all",
) -> dict[str, Any]:
    """Figures of balancers on each workload, by dispatcher."""
    cases: dict[str, Any] = {}
    for name in workloads:
        trace = trace_of(name, **size, **EXPERTS)
        run = trimtab.Run(model="qwen3-30b-a3b", steps=size["num_steps"] - 1, **step)
        result = trimtab.simulate(trace, run.sweep(dispatcher=DISPATCHERS), policies=policies)
        cases[name] = {"expert_max_over_mean": expert_skew(trace)} | {
            sent: {
                each: {key: figures[key] for key in KEPT} | {"max_over_mean": figures["max_over_mean"]["mean"]}
                for each, figures in case["policies"].items()
            }
            for sent, case in zip(DISPATCHERS, result.figures()["sweep"], strict=True)
        }
    return {"yardstick": yardstick(), "size": dict(size), "step": dict(step), "workloads": cases}


def expert_skew(trace: RoutingTrace) -> float:
    """Load of the hottest expert over the mean, mean of steps and layers; without the first step."""
    found = []
    for step in np.unique(trace.steps)[1:]:
        ids_TLK = trace.select(np.flatnonzero(trace.steps == step)).expert_ids
        for layer in range(trace.num_layers):
            counts_E = np.bincount(ids_TLK[:, layer].ravel(), minlength=trace.num_experts)
            found.append(counts_E.max() / counts_E.mean())
    return float(np.mean(found))


def print_figures(figures: Mapping[str, Any], console: Console) -> None:
    """Print the table as it stands on the page."""
    console.print(*blocks(figures).values(), sep="\n\n", markup=False, soft_wrap=True)


def blocks(figures: Mapping[str, Any]) -> dict[str, str]:
    """The generated part of docs/results.md, by name."""
    header = ["workload", "sent", "max/mean, experts", "ranks", "`static`", "`scheduled`", "`eplb`", "best other"]
    header += ["`trimtab`", "ratio", "with our slots", "its ratio", "ideal"]
    rows, ratios, alike_ratios = [], {}, []
    for name, case in figures["workloads"].items():
        for sent in DISPATCHERS:
            policies = case[sent]
            best, alike = best_others(policies)
            ratios[f"`{name}` ({sent})"] = ratio(policies, best)
            alike_ratios.append(ratio(policies, alike))
            own = [_seconds(policies, each) for each in ("static", "scheduled", "eplb", best, TRIMTAB)]
            own[3] = f"`{best}` {own[3]}"
            rows.append([
                f"`{name}`", sent, f"{case['expert_max_over_mean']:.2f}", f"{policies['static']['max_over_mean']:.2f}",
                *own, f"{ratio(policies, best):+.2%}", f"`{alike}`", f"{ratio(policies, alike):+.2%}",
                _seconds(policies, IDEAL),
            ])  # fmt: skip
    behind = [f"{name} {value:+.2%}" for name, value in ratios.items() if value > EVEN]
    same = [name for name, value in ratios.items() if abs(value) <= EVEN]
    notes = [
        f"Trimtab is behind the best other balancer by more than {EVEN:.1%} in {len(behind)} of {len(ratios)} cases"
        f"{': ' + ', '.join(behind) if behind else ''}.",
        f"It is within {EVEN:.1%} of it in {len(same)}{': ' + ', '.join(same) if same else ''}.",
        "Compared with the best of those with no more slots, its ratio is "
        f"{min(alike_ratios):+.2%} to {max(alike_ratios):+.2%}.",
    ]
    return {"imbalance": "\n".join([markdown_table(header, rows), "", *(f"* {note}" for note in notes)])}


def best_others(policies: Mapping[str, Any]) -> tuple[str, str]:
    """The fastest other balancer that fits, and the fastest with no more slots than Trimtab."""
    others = [name for name, policy in policies.items() if name not in (TRIMTAB, IDEAL) and policy["fits"]]
    ours = policies[TRIMTAB]["slots_per_rank"]
    alike = [name for name in others if policies[name]["slots_per_rank"] <= ours]
    best, best_alike = (min(names, key=lambda name: policies[name]["step_time_s"]) for names in (others, alike))
    return best, best_alike


def ratio(policies: Mapping[str, Any], other: str) -> float:
    """Trimtab's step time over another balancer's, minus 1: negative if Trimtab is faster."""
    return float(policies[TRIMTAB]["step_time_s"] / policies[other]["step_time_s"] - 1)


def _seconds(policies: Mapping[str, Any], name: str) -> str:
    return f"{policies[name]['step_time_s']:.3f} s"


if __name__ == "__main__":
    main("experiments.imbalance_workloads")
