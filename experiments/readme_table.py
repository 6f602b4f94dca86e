"""`python -m experiments.readme_table`: write the table of the README from stored figures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.page_tables import markdown_table, replace_tables
from experiments.simulated import DISPATCHERS, seconds_by_kind
from trimtab.cluster import ModelSpec
from trimtab.cluster.specs import RING_LAYERS
from trimtab.report.number_text import bytes_text

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def stored(name: str) -> Any:
    """The figures of a file in docs/benchmarks."""
    return json.loads((ROOT / "docs" / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def blocks() -> dict[str, str]:
    """The generated part of the README, by name."""
    rows = [["**Expected gain**", _gain()], ["**Measured**", _measured()], ["**Runs on**", _runs()]]
    return {"facts": markdown_table(["", "in short"], [*rows, ["**Costs**", _costs()]]).replace("---:", "---")}


def _gain() -> str:
    """The range over kinds of routing, with each dispatcher."""
    figures = stored("simulated")
    kinds = {sent: seconds_by_kind(figures["steps"], sent).values() for sent in DISPATCHERS}
    over = {
        (sent, than): _range([seconds[than] / seconds["trimtab"] for seconds in each])
        for sent, each in kinds.items() for than in ("eplb", "static")
    }  # fmt: skip
    return (
        f"over EPLB {over['tokens', 'eplb']} if the dispatcher sends a token to a node once, as DeepEP does, and "
        f"{over['rows', 'eplb']} if an all-to-all sends every row. Over plain EP {over['tokens', 'static']} and "
        f"{over['rows', 'static']}. Simulated, Qwen3-30B-A3B on {figures['step']['ranks']} H100, with routing that is "
        f"persistent, with ids in random order, drifting or mild. {_behind(kinds['tokens'])}"
    )


def _behind(kinds: Iterable[dict[str, float]]) -> str:
    """Which other balancer is faster than `trimtab` by most, if one is."""
    faster = [
        (seconds["trimtab"] / other_s - 1, name)
        for seconds in kinds for name, other_s in seconds.items() if name not in ("trimtab", "balanced")
    ]  # fmt: skip
    part, name = max(faster)
    return f"Of other balancers `{name}` is faster by at most {part:.1%}" if part > 0 else "No other balancer is faster"


def _range(ratios: list[float]) -> str:
    return f"{min(ratios):.2f}x to {max(ratios):.2f}x"


def _measured() -> str:
    megatron, demo, live = stored("megatron-cpu"), stored("demo")["comparison"], stored("runtime-cpu")
    seeds = sorted(run["speedup"] for run in stored("demo")["seeds"])
    plain, planned = (megatron["variants"][f"{name}_skewed"]["median_s"] for name in ("plain", "planned"))
    static, ours = (live["policies"][name]["median_s"] for name in ("static", "trimtab"))
    low, high = demo["speedup_interval"]
    sure = "" if low > 1 else ", no sure gain"
    return (
        f"on 2 CPU ranks with skewed routing: a step of Megatron-core {planned:.2f} s instead of {plain:.2f} s, a "
        f"micro-step of the runtime {ours:.2f} s instead of {static:.2f} s; `make demo` {demo['speedup']:.2f}x "
        f"({low:.2f} to {high:.2f}{sure}), with {len(seeds)} seeds {seeds[0]:.2f}x to {seeds[-1]:.2f}x. **Equal "
        f"loss**: with and without Trimtab the losses of the demo differ by {demo['loss_difference']:.0e}"
    )


def _runs() -> str:
    return (
        "ran in the framework, on CPU ranks: Megatron-core, verl, slime, transformers and TRL with FSDP2, your own "
        "loop. Written against the framework's source, of which parts ran: miles, ROLL, NeMo-RL, SkyRL, ms-swift, "
        "prime-rl. Of torchtitan, AReaL and Automodel the MoE blocks ran. One H200 has run it, alone and shared by two "
        "ranks; **it has not run on several GPUs**"
    )


def _costs() -> str:
    megatron = stored("megatron-cpu")
    low, high = megatron["overhead_when_balanced_interval"]
    stages = stored("gpu-h200")["stages"]
    ratios = [
        finding["figures"]["ratio"]
        for stage in stages
        for finding in stage["findings"]
        if stage["name"] == "megatron" and "case" in finding["figures"]
    ]
    skewed = next(iter(stored("simulated")["steps"].values()))
    slots = [skewed[sent]["policies"]["trimtab"]["slots_per_rank"] for sent in ("tokens", "rows")]
    copies = " or ".join(str(number) for number in sorted({*slots}))
    weights = bytes_text(RING_LAYERS * max(slots) * ModelSpec.named("qwen3-30b-a3b").expert_bytes)
    return (
        f"memory for {RING_LAYERS} x {copies} experts a rank in these cases ({weights} of weights at most, and "
        "gradients in transfer); a flag, one line, or about ten lines in your own loop; with even routing "
        f"{low:+.1%} to {high:+.1%} of a step on CPU ranks. On one rank of an H200, where the host is the limit "
        f"and plain Megatron exchanges nothing, a planned layer takes {min(ratios):.2f} to {max(ratios):.2f} times as "
        "long: an upper bound, of a case that nobody runs"
    )


if __name__ == "__main__":
    replace_tables(blocks(), README)
