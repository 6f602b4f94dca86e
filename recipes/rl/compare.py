"""Comparison of net step time: two trainers train the same responses from the same weights, static and balanced.

The result in words, figures for `summary.json`, and the page of a simulated step with measured times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table

from recipes.rl.responses import Response, gather
from trimtab.array_type import Array
from trimtab.calibration.alternating_rounds import median_with_interval
from trimtab.planner.plan.pass_times import PARTS
from trimtab.report.html import write_html
from trimtab.report.model import LoadMap, PolicyResult, Report, Timeline
from trimtab.report.number_text import seconds
from trimtab.report.timelines import write_perfetto
from trimtab.runtime.ranks.recorder import (
    ACTIVITIES,
    BACKWARD,
    COMBINE,
    DISPATCH,
    EXPERTS,
    OTHER,
    REFRESHING,
    SUMMING,
    WAITING,
    Recording,
)  # fmt: skip
from trimtab.simulator.recorded_operations import LANES

if TYPE_CHECKING:
    from recipes.rl.train import Trainer

# No rank continues a collective before the last one has started it.
COLLECTIVES = (DISPATCH, COMBINE, DISPATCH + BACKWARD, COMBINE + BACKWARD)
IMBALANCE = len(ACTIVITIES)
NAMES = (*ACTIVITIES, "waiting for other ranks")
PART_OF = {
    OTHER: "attention", OTHER + BACKWARD: "attention", EXPERTS: "experts", EXPERTS + BACKWARD: "experts",
    **dict.fromkeys(COLLECTIVES, "dispatch"), WAITING: "transfers", REFRESHING: "migration", SUMMING: "optimizer",
    IMBALANCE: "imbalance",
}  # fmt: skip
ABOUT = {
    "static": "uses no routing; no replicas",
    "trimtab": "schedule, homes, replicas and split, planned from the recorded routing",
}
NOTES = (
    "Measured, not simulated. Two trainers start with the same weights and train the same responses, step after step. "
    "They take turns in being first.",
    "Step time is net: from the arrival of a step's responses until its optimizer steps are done and the rollout model "
    "has the new weights. It includes planning, the exchange of responses and moves of experts, but not the rollout.",
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
            planning, exchange of responses, moves, recompute, update and weight synchronisation.
        metrics: of each step, as in `metrics.jsonl`.
        loads_MLR: tokens `[M, L, R]` int64 that each rank computes in the recorded step.
        recorded: metrics of one more step, which was recorded.
        recordings: activities of each rank in that step, in rank order.
    """

    step_s: list[float]
    metrics: list[Metrics]
    loads_MLR: Array
    recorded: Metrics
    recordings: tuple[Recording, ...]

    @property
    def median_s(self) -> float:
        """Median of `step_s`."""
        return statistics.median(self.step_s)

    def median(self, name: str) -> float:
        """Median of a metric over the steps."""
        return statistics.median(metrics[name] for metrics in self.metrics)

    def total(self, name: str) -> int:
        """Sum of a metric over the steps."""
        return int(sum(metrics[name] for metrics in self.metrics))


@dataclass(frozen=True, eq=False)
class PairedComparison:
    """Both policies on the same responses: expert parallelism without replicas, and the run's mode."""

    static: MeasuredPolicy
    balanced: MeasuredPolicy

    @property
    def policies(self) -> dict[str, MeasuredPolicy]:
        """Both, by name."""
        return {"static": self.static, "trimtab": self.balanced}

    @property
    def speedup(self) -> tuple[float, list[float]]:
        """Step time of static divided by that of the other: median over the pairs, and its 95% interval."""
        return median_with_interval([s / b for s, b in zip(self.static.step_s, self.balanced.step_s, strict=True)])

    def largest_difference(self, name: str) -> float:
        """Largest difference of a metric of a pair. Losses and norms are equal but for rounding."""
        pairs = zip(self.static.metrics, self.balanced.metrics, strict=True)
        return max(abs(static[name] - balanced[name]) for static, balanced in pairs)

    def figures(self) -> dict[str, Any]:
        """The comparison in `summary.json`. On rank 0.

        `busiest_part` of a static step goes to the experts of the rank that is busiest between two collectives;
        `possible_speedup` is that of even loads, if nothing else changes.
        """
        (ratio, interval), busiest = self.speedup, busiest_part(self.static.recordings)
        max_vio = self.static.median("moe/max_vio_after")
        smallest_norm = max(min(metrics["grad_norm"] for metrics in self.static.metrics), 1e-30)
        return {
            "speedup": ratio,
            "speedup_interval": interval,
            "busiest_part": busiest,
            "possible_speedup": 1 / (1 - busiest * max_vio / (1 + max_vio)),
            "loss_difference": self.largest_difference("loss"),
            "norm_difference": self.largest_difference("grad_norm") / smallest_norm,
            **{
                name: {
                    "median_s": policy.median_s,
                    "step_s": policy.step_s,
                    "max_vio": policy.median("moe/max_vio_after"),
                    "replicas": policy.total("moe/replicas"),
                    "homes_moved": policy.total("moe/homes_moved"),
                    **{time: policy.median(time) for time in ("planning_s", "waited_s", "moving_s")},
                }
                for name, policy in self.policies.items()
            },
        }


def compare_policies(
    static: Trainer, balanced: Trainer, first_step: int, pairs: int, advance: Callable[[str], None] = lambda note: None
) -> PairedComparison:
    """Train `pairs` steps with both trainers, and time each. Both change. Collective.

    A pair before them warms up, one after them is recorded. The trainers alternate in which is first.

    Args:
        static: in mode `static`, with the weights and optimizer state of `balanced`.
        balanced: the run's trainer; it also samples the responses.
        first_step: index of the first RL step.
        pairs: number of pairs that are timed.
        advance: called after each pair with "".
    """
    trainers = {"static": static, "trimtab": balanced}
    times: dict[str, list[float]] = {name: [] for name in trainers}
    metrics: dict[str, list[Metrics]] = {name: [] for name in trainers}
    for pair in range(pairs + 1):
        responses = balanced.algorithm.trained(balanced.rollout(first_step + pair))
        for name in list(trainers)[:: -1 if pair % 2 else 1]:
            taken, of_step = _train(trainers[name], responses, first_step + pair)
            if pair:
                times[name].append(taken)
                metrics[name].append(of_step)
        if pair:
            advance("")
    last = first_step + pairs + 1
    responses = balanced.algorithm.trained(balanced.rollout(last))
    results = {}
    for name, trainer in trainers.items():
        dist.barrier()
        with trainer.session.recording() as recorder:
            _, recorded = _train(trainer, responses, last)
            recordings = gather(recorder.finish())
        loads = trainer.session.rank_loads
        results[name] = MeasuredPolicy(times[name], metrics[name], loads, recorded, tuple(recordings))
    return PairedComparison(results["static"], results["trimtab"])


def _train(trainer: Trainer, responses: Sequence[Response], step: int) -> tuple[float, Metrics]:
    """Seconds and metrics of an RL step, from a common start until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    _, metrics = trainer.train(responses, step)
    dist.barrier()
    return time.perf_counter() - start, metrics


def busiest_part(recordings: Sequence[Recording]) -> float:
    """The part of a step, 0 to 1, that goes to the experts of the rank that takes longest, between two collectives each.

    Args:
        recordings: of all ranks, in one step. The n-th collective of a rank is the n-th of all ranks.
    """
    most = max(int(np.isin(each.kind_N, COLLECTIVES).sum()) for each in recordings) + 1
    expert_s = []
    for each in recordings:
        number_N, is_expert_N = (
            np.cumsum(np.isin(each.kind_N, COLLECTIVES)),
            np.isin(each.kind_N, (EXPERTS, EXPERTS + BACKWARD)),
        )
        seconds_N = (each.end_N - each.start_N)[is_expert_N]
        expert_s.append(np.bincount(number_N[is_expert_N], seconds_N, minlength=most))
    return float(np.max(expert_s, axis=0).sum() / np.mean([each.end_N[-1] - each.start_N[0] for each in recordings]))


def sentences(comparison: PairedComparison, figures: Mapping[str, Any]) -> tuple[str, str, str]:
    """The result in two or three sentences; what even loads could gain; how far the two trainers differ."""
    ratio, (low, high) = comparison.speedup
    static, balanced = comparison.static, comparison.balanced
    measured = f"{ratio:.2f} times as fast as static expert parallelism (95% interval {low:.2f} to {high:.2f})"
    result = "Trimtab is slower here" if high < 1 else "no sure gain is measured here"
    claim = f"Trimtab makes a training step {measured}" if low > 1 else f"{result}: a training step is {measured}"
    return (
        f"With planning and moves in the clock, {claim}. The busiest rank has "
        f"{balanced.median('moe/max_vio_after'):.1%} more than the mean instead of "
        f"{static.median('moe/max_vio_after'):.1%}.",
        f"Experts of the busiest rank are {figures['busiest_part']:.0%} of a static step: with even loads, and nothing "
        f"else changed, it would be {figures['possible_speedup']:.2f} times as fast.",
        f"Both trainers compute the same step: losses differ by {figures['loss_difference']:.1g} at most, norms of "
        f"gradients by {figures['norm_difference']:.1g} of the norm.",
    )


def show_comparison(
    screen: Console, held_out: int, accuracies: Mapping[str, float], comparison: PairedComparison | None
) -> dict[str, Any]:
    """Print accuracies and the comparison. Returns the content of `summary.json`."""
    table = Table("model", Column("accuracy", justify="right"))
    for name, accuracy in accuracies.items():
        table.add_row(name, f"{accuracy:.1%}")
    screen.print(f"\nHeld-out accuracy, {held_out} problems, greedy", table, sep="\n")
    if comparison is None:
        return {"held_out_accuracy": dict(accuracies)}
    headers = ("step time", "max_vio", "replicas", "moved", "planning", "waiting")
    title = f"Net step time, medians of {len(comparison.static.step_s)} training steps"
    table = Table("policy", *(Column(name, justify="right") for name in headers), title=title, title_justify="left")
    figures = comparison.figures()
    for name in comparison.policies:
        row = figures[name]
        cells = f"{row['median_s']:.3f} s", f"{row['max_vio']:.3f}", f"{row['replicas']:,}", f"{row['homes_moved']:,}"
        table.add_row(name, *cells, seconds(row["planning_s"]), seconds(row["waited_s"]))
    screen.print(table, *sentences(comparison, figures), sep="\n")
    return {"held_out_accuracy": dict(accuracies), "comparison": figures}


def write_page(trainer: Trainer, comparison: PairedComparison, summary: Mapping[str, Any]) -> None:
    """Write `report.html`, and its timelines for Perfetto. On rank 0, which has the recordings."""
    report, out = report_of(trainer, comparison, summary["comparison"]), trainer.config.out
    write_html(report, out / "report.html", summary)
    write_perfetto(report.timelines, out / "timeline.json.gz")


def report_of(trainer: Trainer, comparison: PairedComparison, figures: Mapping[str, Any]) -> Report:
    """The page of a comparison."""
    static, balanced, config = comparison.static, comparison.balanced, trainer.config
    result, *notes = sentences(comparison, figures)
    low, high = figures["speedup_interval"]
    M, L, R = balanced.loads_MLR.shape
    model, topology = trainer.model_config, trainer.session.topology
    facts = {
        "model": f"{model.model_type}, {L} MoE layers, {trainer.session.num_experts} experts, top-{model.num_experts_per_tok}",
        "ranks": f"{R}, {topology.ranks_per_node} per node, {trainer.device.type.upper()}",
        "step": f"{len(static.loads_MLR)} micro-steps under static, {M} under trimtab",
        "token budget": f"{config.token_budget:,} per rank and micro-step",
        "slots": f"{config.slots} per rank",
        "mode": config.mode,
        "pairs": str(len(static.step_s)),
        "95% interval of the ratio": f"{low:.2f} to {high:.2f}",
        "replicas": f"{balanced.total('moe/replicas'):,} in all steps",
        "homes moved": f"{balanced.total('moe/homes_moved'):,} in all steps",
        "planning, training waited": f"{seconds(balanced.median('waited_s'))} a step",
        "planning during the rollout": f"{seconds(balanced.median('ahead_s'))} a step",
        "planning during the step": f"{seconds(balanced.median('plan/background_s'))} a step",
        "moves": f"{seconds(balanced.median('moving_s'))} a step",
    }
    lane = LANES.index("network" if topology.ranks_per_node < R else "node link")
    split = {name: with_waiting(policy.recordings) for name, policy in comparison.policies.items()}
    return Report(
        title=f"Trimtab, training run {config.out.name}",
        answer=result,
        facts=tuple(facts.items()),
        policies=tuple(
            _policy_result(name, policy, split[name], comparison.speedup[0] if policy is balanced else 1.0, trainer)
            for name, policy in comparison.policies.items()
        ),
        layer_names=tuple(str(layer) for layer in trainer.layer_indices.tolist()),
        before=LoadMap("static", static.loads_MLR),
        after=LoadMap("trimtab", balanced.loads_MLR),
        timelines=tuple(timeline_of(name, recordings, lane) for name, recordings in split.items()),
        notes=(*NOTES, *notes),
        table_title=f"Net step time, medians of {len(static.step_s)} training steps",
        marks_fastest=not low <= 1 <= high,
    )


def _policy_result(
    name: str, policy: MeasuredPolicy, recordings: Sequence[Recording], speedup: float, trainer: Trainer
) -> PolicyResult:
    parameters = float(sum(parameter.nbytes for parameter in trainer.model.parameters()))
    memory = {"parameters": parameters, "gradients": parameters, "optimizer state": 2 * parameters}
    recorded, (M, L, _) = policy.recorded, policy.loads_MLR.shape
    if recorded["moe/replicas"]:
        memory["replica pool"] = recorded["memory/pool_bytes"]
        memory["host mirror of the node"] = recorded["memory/mirror_bytes"]
    return PolicyResult(
        name=name,
        about=ABOUT[name],
        step_time_s=policy.median_s,
        speedup=speedup,
        fraction_of_balanced=None,
        max_over_mean=1 + policy.median("moe/max_vio_after"),
        parts_s=parts_of(recordings, policy.median_s, recorded["waited_s"], recorded["moving_s"]),
        memory_bytes=memory,
        replicas_per_instance=policy.median("moe/replicas") / (M * L),
    )


def with_waiting(recordings: Sequence[Recording]) -> tuple[Recording, ...]:
    """Recordings in which dispatch and combine start when the last rank has reached them.

    The time before counts as waiting for other ranks. The n-th collective of a rank is the n-th of all ranks. If
    the recordings differ in the order of collectives, they are returned unchanged.
    """
    places = [np.flatnonzero(np.isin(recording.kind_N, COLLECTIVES)) for recording in recordings]
    kinds = [recording.kind_N[place].tolist() for recording, place in zip(recordings, places, strict=True)]
    if any(other != kinds[0] for other in kinds):
        return tuple(recordings)
    last = np.max([recording.start_N[place] for recording, place in zip(recordings, places, strict=True)], axis=0)
    result = []
    for recording, place in zip(recordings, places, strict=True):
        met = np.clip(last, recording.start_N[place], recording.end_N[place])
        start_N = recording.start_N.copy()
        start_N[place] = met
        result.append(
            replace(
                recording,
                kind_N=np.insert(recording.kind_N, place, IMBALANCE),
                layer_N=np.insert(recording.layer_N, place, recording.layer_N[place]),
                start_N=np.insert(start_N, place, recording.start_N[place]),
                end_N=np.insert(recording.end_N, place, met),
            )
        )
    return tuple(result)


def parts_of(
    recordings: Sequence[Recording], step_time_s: float, planning_s: float, migration_s: float
) -> dict[str, float]:
    """Seconds by part, mean over ranks, scaled so that their sum is the step time.

    Planning and migration happen outside of micro-steps, which recordings count as attention and other.
    """
    seconds_RK = [
        np.bincount(recording.kind_N, recording.end_N - recording.start_N, minlength=len(NAMES))
        for recording in recordings
    ]
    parts_s = dict.fromkeys(PARTS, 0.0) | {"planning": planning_s, "migration": migration_s}
    parts_s["attention"] -= planning_s + migration_s
    for kind, part in PART_OF.items():
        parts_s[part] += float(np.mean(seconds_RK, axis=0)[kind])
    total = sum(parts_s.values())
    return {part: step_time_s * value / total for part, value in parts_s.items() if value > 0}


def timeline_of(name: str, recordings: Sequence[Recording], link_lane: int) -> Timeline:
    """Timeline of the update of the micro-step with the median time.

    Args:
        name: of the policy.
        recordings: of all ranks.
        link_lane: index into `LANES` of the link that dispatch and combine use.
    """
    begins = np.array([[begin for _, begin, _ in r.micro_steps] for r in recordings]).min(axis=0)
    ends = np.array([[end for _, _, end in r.micro_steps] for r in recordings]).max(axis=0)
    # The first half of all passes is recompute, the second half is the update.
    updates = np.arange(len(begins) // 2, len(begins))
    chosen = int(updates[np.argsort((ends - begins)[updates], kind="stable")[(len(updates) - 1) // 2]])
    columns = []
    for rank, recording in enumerate(recordings):
        index, begin, end = recording.micro_steps[chosen]
        inside = (recording.start_N >= begin) & (recording.end_N <= end) & (recording.end_N > recording.start_N)
        kind_N = recording.kind_N[inside]
        lane_N = np.where(np.isin(kind_N, COLLECTIVES), link_lane, LANES.index("compute"))
        times = (recording.start_N[inside] - begins[chosen], recording.end_N[inside] - begins[chosen])
        columns.append((kind_N, lane_N, np.full(len(kind_N), rank), recording.layer_N[inside], *times))
    kind_N, lane_N, rank_N, layer_N, start_N, end_N = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Timeline(
        f"{name}, update of micro-step {index}", NAMES, kind_N.astype(np.uint8), lane_N.astype(np.uint8),
        rank_N.astype(np.int16), layer_N.astype(np.int16), start_N, end_N,
    )  # fmt: skip
