"""Comparison of net step time: two trainers train the same responses from the same weights, static and balanced.

The result in words, figures for `summary.json`, and the page of a simulated step with measured times.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table

from recipes.rl.responses import Response, gather
from trimtab.array_type import Array
from trimtab.calibration.alternating_rounds import median_with_interval
from trimtab.files import write_atomically
from trimtab.report.html import write_html
from trimtab.report.model import LoadMap, PolicyResult, Report, Timeline
from trimtab.report.number_text import seconds
from trimtab.report.timelines import write_perfetto
from trimtab.runtime.ranks import recorder as kinds
from trimtab.runtime.ranks.recorder import BACKWARD, Recording
from trimtab.timeline import PARTS
from trimtab.timeline.recorded_operations import LANES

if TYPE_CHECKING:
    from recipes.rl.train import Trainer

# No rank continues a collective before the last one has started it.
COLLECTIVES = (kinds.DISPATCH, kinds.COMBINE, kinds.DISPATCH + BACKWARD, kinds.COMBINE + BACKWARD)
EXPERTS = (kinds.EXPERTS, kinds.EXPERTS + BACKWARD)
IMBALANCE = len(kinds.ACTIVITIES)
NAMES = (*kinds.ACTIVITIES, "waiting for other ranks")
# Parts of the page's bars by kind of activity; all others are attention and other.
PART_OF = {
    **dict.fromkeys(EXPERTS, "experts"), **dict.fromkeys(COLLECTIVES, "dispatch"), kinds.WAITING: "transfers",
    kinds.REFRESHING: "migration", kinds.SUMMING: "optimizer", IMBALANCE: "imbalance",
}  # fmt: skip
ABOUT = {
    "static": "uses no routing; no replicas",
    "trimtab": "schedule, replicas and split, planned from the recorded routing",
}
NOTES = (
    "Measured, not simulated. Two trainers start with the same weights and train the same responses, step after step. "
    "They take turns in being first.",
    "Step time is net: from the arrival of a step's responses until its optimizer steps are done and the rollout model "
    "has the new weights. It includes planning, and the exchange of responses, but not the rollout.",
    "Bars, loads and timelines are of one more step, the parts scaled to the median step time. Attention and other is "
    "everything that no other part names, such as the loss, optimizers, weight synchronisation and a value model.",
    "A rank that reaches a dispatch or combine before the others waits for them; the time after the last rank has "
    "reached it counts as dispatch or combine. Ranks also wait because of uneven attention and other processes on the "
    "machine.",
)
Metrics = dict[str, float]


@dataclass(frozen=True, eq=False)
class MeasuredPolicy:
    """Steps of one policy.

    Attributes:
        step_s: seconds of each step from the arrival of its responses until the rollout model has the new weights:
            planning, exchange of responses, recompute, update and weight synchronisation.
        metrics: of each step, as in `metrics.jsonl`.
        loads_MLR: tokens `[M, L, R]` int64 that each rank computes in the recorded step.
        recorded: metrics of one more step, which was recorded.
        recordings: activities of each rank in that step, in rank order.
    """

    step_s: list[float]
    metrics: list[Metrics]
    loads_MLR: Array
    recorded: Metrics
    recordings: Sequence[Recording]

    def median(self, name: str) -> float:
        """Median of a metric over the steps."""
        return statistics.median(metrics[name] for metrics in self.metrics)

    def figures(self) -> dict[str, Any]:
        """The policy in `summary.json`."""
        return {
            "median_s": statistics.median(self.step_s),
            "step_s": self.step_s,
            "max_vio": self.median("moe/max_vio_after"),
            "replicas": int(sum(metrics["moe/replicas"] for metrics in self.metrics)),
            **{time: self.median(time) for time in ("planning_s", "waited_s")},
        }


Policies = Mapping[str, MeasuredPolicy]
"""`static`, expert parallelism on contiguous homes without replicas, and `trimtab`, the run's mode."""


def compare_policies(static: Trainer, balanced: Trainer, steps: Iterable[int]) -> Policies:
    """Train these RL steps with both trainers, and time all but the first. Both change. Collective.

    One more step after them is recorded. The trainers alternate in which is first.

    Args:
        static: in mode `static`, with the weights and optimizer state of `balanced`.
        balanced: the run's trainer; it also samples the responses.
    """
    trainers = {"static": static, "trimtab": balanced}
    timed: dict[str, list[tuple[float, Metrics]]] = {name: [] for name in trainers}
    for pair, step in enumerate(steps):
        responses = balanced.algorithm.trained(balanced.rollout(step))
        for name in list(trainers)[:: -1 if pair % 2 else 1]:
            timed[name].append(_train(trainers[name], responses, step))
    responses = balanced.algorithm.trained(balanced.rollout(step + 1))
    policies = {}
    for name, trainer in trainers.items():
        dist.barrier()
        with trainer.session.recording() as recorder:
            _, recorded = _train(trainer, responses, step + 1)
            recordings = gather(recorder.finish())
        times, metrics = (list(column) for column in zip(*timed[name][1:], strict=True))
        policies[name] = MeasuredPolicy(times, metrics, trainer.session.rank_loads, recorded, recordings)
    return policies


def _train(trainer: Trainer, responses: Sequence[Response], step: int) -> tuple[float, Metrics]:
    """Seconds and metrics of an RL step, from a common start until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    _, metrics = trainer.train(responses, step)
    dist.barrier()
    return time.perf_counter() - start, metrics


def comparison_figures(policies: Policies) -> dict[str, Any]:
    """The comparison in `summary.json`.

    `speedup` is step time of static divided by the other's: median over the pairs, with its 95% interval. The part
    `busiest_part` of a static step goes to the experts of the busiest rank; `possible_speedup` is that of even loads,
    if nothing else changes. Losses and gradient norms of a pair are equal but for rounding.
    """
    static, balanced = policies["static"], policies["trimtab"]
    ratio, interval = median_with_interval([s / b for s, b in zip(static.step_s, balanced.step_s, strict=True)])
    busiest, max_vio = busiest_part(static.recordings), static.median("moe/max_vio_after")
    pairs = list(zip(static.metrics, balanced.metrics, strict=True))
    smallest_norm = max(min(one["grad_norm"] for one, _ in pairs), 1e-30)
    return {
        "speedup": ratio,
        "speedup_interval": interval,
        "busiest_part": busiest,
        "possible_speedup": 1 / (1 - busiest * max_vio / (1 + max_vio)),
        "loss_difference": max(abs(one["loss"] - other["loss"]) for one, other in pairs),
        "norm_difference": max(abs(one["grad_norm"] - other["grad_norm"]) for one, other in pairs) / smallest_norm,
        **{name: policy.figures() for name, policy in policies.items()},
    }


def busiest_part(recordings: Sequence[Recording]) -> float:
    """The part of a step, 0 to 1, in which experts of the slowest rank run, between two collectives each.

    Args:
        recordings: of all ranks, in one step. The n-th collective of a rank is the n-th of all ranks.
    """
    most = max(int(np.isin(each.kind_N, COLLECTIVES).sum()) for each in recordings) + 1
    expert_s = []
    for each in recordings:
        number_N, is_expert_N = np.cumsum(np.isin(each.kind_N, COLLECTIVES)), np.isin(each.kind_N, EXPERTS)
        seconds_N = (each.end_N - each.start_N)[is_expert_N]
        expert_s.append(np.bincount(number_N[is_expert_N], seconds_N, minlength=most))
    return float(np.max(expert_s, axis=0).sum() / np.mean([each.end_N[-1] - each.start_N[0] for each in recordings]))


def sentences(figures: Mapping[str, Any]) -> tuple[str, str, str]:
    """The result in two or three sentences; what even loads could gain; how far the two trainers differ."""
    ratio, (low, high) = figures["speedup"], figures["speedup_interval"]
    measured = f"{ratio:.2f} times as fast as static expert parallelism (95% interval {low:.2f} to {high:.2f})"
    result = "Trimtab is slower here" if high < 1 else "no sure gain is measured here"
    claim = f"Trimtab makes a training step {measured}" if low > 1 else f"{result}: a training step is {measured}"
    return (
        f"With planning in the clock, {claim}. The busiest rank has {figures['trimtab']['max_vio']:.1%} more "
        f"than the mean instead of {figures['static']['max_vio']:.1%}.",
        f"Experts of the busiest rank are {figures['busiest_part']:.0%} of a static step: with even loads, and nothing "
        f"else changed, it would be {figures['possible_speedup']:.2f} times as fast.",
        f"Both trainers compute the same step: losses differ by {figures['loss_difference']:.1g} at most, norms of "
        f"gradients by {figures['norm_difference']:.1g} of the norm.",
    )


def show_results(screen: Console, trainer: Trainer, policies: Policies | None) -> list[str]:
    """Print accuracies and the comparison, and write the files of both. Returns their names. On rank 0."""
    out, accuracies, files = trainer.config.out, trainer.held_out_accuracy, ["summary.json"]
    table = Table("model", Column("accuracy", justify="right"))
    for name, accuracy in accuracies.items():
        table.add_row(name, f"{accuracy:.1%}")
    screen.print(f"\nHeld-out accuracy, {trainer.config.held_out} problems, greedy", table, sep="\n")
    summary: dict[str, Any] = {"held_out_accuracy": accuracies}
    if policies is not None:
        summary["comparison"] = figures = comparison_figures(policies)
        report = report_of(trainer, policies, figures)
        headers = ("step time", "max_vio", "replicas", "planning", "waiting")
        columns = [Column(name, justify="right") for name in headers]
        table = Table("policy", *columns, title=report.table_title, title_justify="left")
        for name in policies:
            row = figures[name]
            counts = f"{row['max_vio']:.3f}", f"{row['replicas']:,}"
            times = seconds(row["planning_s"]), seconds(row["waited_s"])
            table.add_row(name, f"{row['median_s']:.3f} s", *counts, *times)
        screen.print(table, *sentences(figures), sep="\n")
        write_html(report, out / "report.html", summary)
        write_perfetto(report.timelines, out / "timeline.json.gz")
        files += ["report.html", "timeline.json.gz"]
    write_atomically(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    return files


def report_of(trainer: Trainer, policies: Policies, figures: Mapping[str, Any]) -> Report:
    """The page of a comparison."""
    static, balanced, config = policies["static"], policies["trimtab"], trainer.config
    result, *notes = sentences(figures)
    low, high = figures["speedup_interval"]
    M, L, R = balanced.loads_MLR.shape
    model, topology = trainer.model_config, trainer.session.topology
    experts = f"{trainer.session.num_experts} experts, top-{model.num_experts_per_tok}"
    facts = {
        "model": f"{model.model_type}, {L} MoE layers, {experts}",
        "ranks": f"{R}, {topology.ranks_per_node} per node, {trainer.device.type.upper()}",
        "micro-steps": f"{len(static.loads_MLR)} (static), {M} (trimtab) of {config.token_budget:,} tokens a rank",
        "mode": f"{config.mode}, {config.slots} slots per rank",
        "95% interval of the ratio": f"{low:.2f} to {high:.2f}, of {len(static.step_s)} pairs",
        "all steps": f"{figures['trimtab']['replicas']:,} replicas",
    }
    times = {
        "planning, training waited": "waited_s", "planning during the rollout": "ahead_s",
        "planning during the step": "plan/background_s",
    }  # fmt: skip
    facts |= {name: f"{seconds(balanced.median(metric))} a step" for name, metric in times.items()}
    lane = LANES.index("network" if topology.ranks_per_node < R else "node link")
    split = {name: with_waiting(policy.recordings) for name, policy in policies.items()}
    nbytes = float(sum(parameter.nbytes for parameter in trainer.model.parameters()))
    memory = {"parameters": nbytes, "gradients": nbytes, "optimizer state": 2 * nbytes}
    names = {"pool": "replica pool", "mirror": "host mirror of the node"}
    pool = {name: balanced.recorded[f"memory/{part}_bytes"] for part, name in names.items()}
    results = []
    for name, policy in policies.items():
        median_s, is_static = figures[name]["median_s"], policy is static
        speedup, of_rank = (1.0, memory) if is_static else (figures["speedup"], memory | pool)
        parts_s = parts_of(split[name], median_s, policy.recorded["waited_s"])
        replicas = policy.median("moe/replicas") / policy.loads_MLR[..., 0].size
        ratio = 1 + figures[name]["max_vio"]
        results.append(PolicyResult(name, ABOUT[name], median_s, speedup, None, ratio, parts_s, of_rank, replicas))
    return Report(
        title=f"Trimtab, training run {config.out.name}",
        answer=result,
        facts=tuple(facts.items()),
        policies=tuple(results),
        layer_names=tuple(str(layer) for layer in trainer.layer_indices.tolist()),
        before=LoadMap("static", static.loads_MLR),
        after=LoadMap("trimtab", balanced.loads_MLR),
        timelines=tuple(timeline_of(name, recordings, lane) for name, recordings in split.items()),
        notes=(*NOTES, *notes),
        table_title=f"Net step time, medians of {len(static.step_s)} training steps",
        marks_fastest=not low <= 1 <= high,
    )


def with_waiting(recordings: Sequence[Recording]) -> Sequence[Recording]:
    """Recordings in which dispatch and combine start when the last rank has reached them.

    The time before counts as waiting for other ranks. The n-th collective of a rank is the n-th of all ranks. If
    the recordings differ in the order of collectives, they are returned unchanged.
    """
    places = [np.flatnonzero(np.isin(each.kind_N, COLLECTIVES)) for each in recordings]
    order = [each.kind_N[place].tolist() for each, place in zip(recordings, places, strict=True)]
    if any(other != order[0] for other in order):
        return recordings
    last = np.max([each.start_N[place] for each, place in zip(recordings, places, strict=True)], axis=0)
    split = []
    for each, place in zip(recordings, places, strict=True):
        met, start_N = np.clip(last, each.start_N[place], each.end_N[place]), each.start_N.copy()
        start_N[place] = met
        split.append(
            replace(
                each,
                kind_N=np.insert(each.kind_N, place, IMBALANCE),
                layer_N=np.insert(each.layer_N, place, each.layer_N[place]),
                start_N=np.insert(start_N, place, each.start_N[place]),
                end_N=np.insert(each.end_N, place, met),
            )
        )
    return split


def parts_of(recordings: Sequence[Recording], step_time_s: float, planning_s: float) -> dict[str, float]:
    """Seconds by part, mean over ranks, scaled so that their sum is the step time.

    Planning happens outside of micro-steps, which recordings count as attention and other.
    """
    seconds_RK = [np.bincount(r.kind_N, r.end_N - r.start_N, minlength=len(NAMES)) for r in recordings]
    parts_s = dict.fromkeys(PARTS, 0.0) | {"planning": planning_s}
    parts_s["attention"] -= planning_s
    for kind, kind_s in enumerate(np.mean(seconds_RK, axis=0).tolist()):
        parts_s[PART_OF.get(kind, "attention")] += kind_s
    total = sum(parts_s.values())
    return {part: step_time_s * value / total for part, value in parts_s.items() if value > 0}


def timeline_of(name: str, recordings: Sequence[Recording], link_lane: int) -> Timeline:
    """Timeline of the update of the micro-step with the median time.

    Args:
        name: of the policy.
        recordings: of all ranks.
        link_lane: index into `LANES` of the link that dispatch and combine use.
    """
    spans_RM2 = np.array([[spans[1:] for spans in each.micro_steps] for each in recordings])
    begin_RM, end_RM = spans_RM2[..., 0], spans_RM2[..., 1]
    begin_M, taken_M = begin_RM.min(axis=0), end_RM.max(axis=0) - begin_RM.min(axis=0)
    # The first half of all passes is recompute, the second half is the update.
    half = len(taken_M) // 2
    chosen = half + int(np.argsort(taken_M[half:], kind="stable")[(len(taken_M) - half - 1) // 2])
    columns = []
    for rank, each in enumerate(recordings):
        index, begin, end = each.micro_steps[chosen]
        inside = (each.start_N >= begin) & (each.end_N <= end) & (each.end_N > each.start_N)
        kind_N = each.kind_N[inside]
        lane_N = np.where(np.isin(kind_N, COLLECTIVES), link_lane, LANES.index("compute"))
        times = each.start_N[inside] - begin_M[chosen], each.end_N[inside] - begin_M[chosen]
        columns.append((kind_N, lane_N, np.full(len(kind_N), rank), each.layer_N[inside], *times))
    whole = [np.concatenate(column) for column in zip(*columns, strict=True)]
    dtypes = (np.uint8, np.uint8, np.int16, np.int16, np.float64, np.float64)
    of_type = [column.astype(dtype) for column, dtype in zip(whole, dtypes, strict=True)]
    return Timeline(f"{name}, update of micro-step {index}", NAMES, *of_type)
