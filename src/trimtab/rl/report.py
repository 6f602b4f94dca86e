"""The report of a training run: the page of a simulated step, with measured times."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from trimtab.planner.plan.pass_times import PARTS
from trimtab.report.charts import Line, LineChart
from trimtab.report.model import LoadMap, PolicyResult, Report, Timeline
from trimtab.report.number_text import seconds
from trimtab.rl.busiest_rank import COLLECTIVES
from trimtab.rl.comparison_text import answer, check, possible
from trimtab.rl.paired_comparison import MeasuredPolicy, PairedComparison
from trimtab.rl.trainer import Trainer
from trimtab.runtime.ranks.recorder import (
    ACTIVITIES,
    BACKWARD,
    EXPERTS,
    OTHER,
    REFRESHING,
    SUMMING,
    WAITING,
    Recording,
)
from trimtab.simulator.recorded_operations import LANES

WAITING_FOR_RANKS = len(ACTIVITIES)
NAMES = (*ACTIVITIES, "waiting for other ranks")
# Most points of a chart.
CHART_PLACES = 15
PART_OF = {
    OTHER: "attention", OTHER + BACKWARD: "attention", EXPERTS: "experts", EXPERTS + BACKWARD: "experts",
    **dict.fromkeys(COLLECTIVES, "dispatch"), WAITING: "transfers", REFRESHING: "migration", SUMMING: "optimizer",
    WAITING_FOR_RANKS: "imbalance",
}  # fmt: skip
ABOUT = {
    "static": "uses no routing; no replicas",
    "trimtab": "schedule, homes, replicas and split, planned from the recorded routing",
}
NOTES = (
    "Measured, not simulated. Two trainers start with the same weights and train the same responses, step after step. "
    "They take turns in being first.",
    "Step time is net: from the arrival of a step's responses until its optimizer steps are done and the rollout model "
    "has the new weights. It includes planning, the exchange of sequences and moves of experts, but not the rollout.",
    "Bars, loads and timelines are of one more step, the parts scaled to the median step time. Attention and other is "
    "everything that no other part names, such as the loss, optimizers and weight synchronisation.",
    "A rank that reaches a dispatch or combine before the others waits for them; the time after the last rank has "
    "reached it counts as dispatch or combine. Ranks also wait because of uneven attention and other processes on the "
    "machine.",
)

OF_TRUNK = (
    "Layers and experts of the value model count as attention and other, and in the measured time of forward and "
    "backward. Its replicas are not among those shown; under static it has none."
)


def rollout_charts(steps: Sequence[Mapping[str, float]]) -> tuple[LineChart, ...]:
    """Lengths of responses, occupancy of the decode batch, and loads of separate expert ranks, over the
    steps of a run.

    Args:
        steps: metrics of every step; those of earlier versions are left out. With more than `CHART_PLACES`, consecutive
            ones are averaged.
    """
    steps = [metrics for metrics in steps if "rollout/occupancy" in metrics]
    if not steps:
        return ()
    parts = np.array_split(np.arange(len(steps)), min(len(steps), CHART_PLACES))
    places = [str(int(steps[int(part[0])]["step"])) for part in parts]

    def line(name: str, metric: str) -> Line:
        return Line(name, [float(np.mean([steps[int(step)][metric] for step in part])) for part in parts])

    charts = [
        LineChart(
            "Tokens of a response",
            "step",
            places,
            [line("longest", "rollout/longest_response"), line("mean of finished", "response_length")],
        ),
        LineChart("Occupied part of the decode batch", "step", places, [line("occupancy", "rollout/occupancy")]),
    ]
    if all("rollout/expert_max_vio" in metrics for metrics in steps):
        loads = [line("max/mean - 1", "rollout/expert_max_vio")]
        charts.append(LineChart("Loads of the rollout's expert ranks", "step", places, loads))
    return tuple(charts)


def report_of(trainer: Trainer, comparison: PairedComparison, steps: Sequence[Mapping[str, float]] = ()) -> Report:
    """The page of a comparison. Only rank 0 has the recordings for it.

    Args:
        steps: metrics of every step of the run.
    """
    static, balanced = comparison.static, comparison.balanced
    split = {name: with_waiting(result.recordings) for name, result in comparison.policies.items()}
    memory = memory_of(trainer)
    policies = []
    for name, result in comparison.policies.items():
        M, L, _ = result.loads_MLR.shape
        recorded = result.recorded
        # Pool and mirror exist in the whole run, but only a policy with replicas needs them.
        pool = {
            "replica pool": recorded["memory/pool_bytes"],
            "host mirror of the node": recorded["memory/mirror_bytes"],
        }
        outside = {"planning": recorded["waited_s"], "migration": recorded["moving_s"]}
        policies.append(
            PolicyResult(
                name=name,
                about=ABOUT[name],
                step_time_s=result.median_s,
                speedup=comparison.speedup[0] if result is balanced else 1.0,
                fraction_of_balanced=None,
                max_over_mean=1 + result.median("moe/max_vio_after"),
                parts_s=parts_of(split[name], result.median_s, outside),
                memory_bytes=memory | (pool if recorded["moe/replicas"] else {}),
                replicas_per_instance=result.median("moe/replicas") / (M * L),
            )
        )
    low, high = comparison.speedup[1]
    where = LANES.index("network" if trainer.session.topology.ranks_per_node < trainer.num_ranks else "node link")
    return Report(
        title=f"Trimtab, training run {trainer.config.out.name}",
        answer=answer(comparison),
        facts=_facts(trainer, comparison),
        policies=tuple(policies),
        layer_names=tuple(str(layer) for layer in trainer.layer_indices.tolist()),
        before=LoadMap("static", static.loads_MLR),
        after=LoadMap("trimtab", balanced.loads_MLR),
        timelines=tuple(timeline_of(name, recordings, where) for name, recordings in split.items()),
        notes=(
            *NOTES,
            *([OF_TRUNK] if trainer.config.value_model == "trunk" else []),
            possible(comparison),
            check(comparison),
        ),
        rollout=rollout_charts(steps),
        table_title=f"Net step time, medians of {len(static.step_s)} training steps",
        marks_fastest=not low <= 1 <= high,
    )


def _facts(trainer: Trainer, comparison: PairedComparison) -> tuple[tuple[str, str], ...]:
    config, static, balanced = trainer.config, comparison.static, comparison.balanced
    M, L, R = balanced.loads_MLR.shape
    top_k = trainer.model_config.num_experts_per_tok
    tokens = int(balanced.loads_MLR[:, 0].sum()) // top_k
    device = torch.cuda.get_device_name() if trainer.device.type == "cuda" else f"CPU, {platform.machine()}"
    low, high = comparison.speedup[1]
    return (
        (
            "model",
            f"{trainer.model_config.model_type}, {L} MoE layers, {trainer.session.num_experts} experts, top-{top_k}",
        ),
        ("ranks", f"{R}, {trainer.session.topology.ranks_per_node} per node"),
        ("device", device),
        ("step", f"{tokens:,} tokens, {len(static.loads_MLR)} micro-steps under static, {M} under trimtab"),
        ("token budget", f"{config.token_budget:,} per rank and micro-step"),
        ("slots", f"{config.slots} per rank"),
        ("mode", config.mode),
        ("pairs", str(len(static.step_s))),
        ("95% interval of the ratio", f"{low:.2f} to {high:.2f}"),
        ("replicas", f"{balanced.total('moe/replicas'):,} in all steps"),
        ("homes moved", f"{balanced.total('moe/homes_moved'):,} in all steps, of {L * trainer.session.num_experts}"),
        ("planning, training waited", f"{seconds(balanced.median('waited_s'))} a step"),
        ("planning during the rollout", f"{seconds(balanced.median('ahead_s'))} a step"),
        ("planning during the step", f"{seconds(balanced.median('plan/background_s'))} a step"),
        ("forward and backward", _predicted_and_measured(balanced)),
        ("moves", f"{seconds(balanced.median('moving_s'))} a step"),
        ("torch", torch.__version__),
    )


def _predicted_and_measured(policy: MeasuredPolicy) -> str:
    """Times of forward and backward of all micro-steps."""
    found = [metrics for metrics in policy.metrics if "plan/measured_s" in metrics]
    if not found:
        return "not measured"
    predicted, measured = (
        seconds(statistics.median(metrics[f"plan/{name}_s"] for metrics in found)) for name in ("predicted", "measured")
    )
    return f"predicted {predicted}, measured {measured} a step"


def memory_of(trainer: Trainer) -> dict[str, float]:
    """Bytes of training state on this rank, by use."""
    trained: list[tuple[torch.nn.Module, torch.optim.Optimizer]] = [(trainer.model, trainer.optimizer)]
    if (value_model := trainer.algorithm.value_model) is not None:
        trained.append((value_model.network, value_model.optimizer))
    state = [value for _, optimizer in trained for values in optimizer.state.values() for value in values.values()]
    parameters = float(sum(parameter.nbytes for network, _ in trained for parameter in network.parameters()))
    return {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer state": float(sum(value.nbytes for value in state if isinstance(value, torch.Tensor))),
    }


def with_waiting(recordings: Sequence[Recording]) -> tuple[Recording, ...]:
    """Recordings in which dispatch and combine start when the last rank has reached them.

    The time before counts as waiting for other ranks. The n-th collective of a rank is the n-th of all ranks. If
    the recordings differ in the order of collectives, they are returned unchanged.
    """
    places = [np.flatnonzero(np.isin(recording.kind_N, COLLECTIVES)) for recording in recordings]
    kinds = [recording.kind_N[place].tolist() for recording, place in zip(recordings, places, strict=True)]
    if any(other != kinds[0] for other in kinds):
        return tuple(recordings)
    starts = [recording.start_N[place] for recording, place in zip(recordings, places, strict=True)]
    last = np.max(starts, axis=0)
    result = []
    for recording, place in zip(recordings, places, strict=True):
        met = np.clip(last, recording.start_N[place], recording.end_N[place])
        start_N = recording.start_N.copy()
        start_N[place] = met
        result.append(
            replace(
                recording,
                kind_N=np.insert(recording.kind_N, place, WAITING_FOR_RANKS),
                layer_N=np.insert(recording.layer_N, place, recording.layer_N[place]),
                start_N=np.insert(start_N, place, recording.start_N[place]),
                end_N=np.insert(recording.end_N, place, met),
            )
        )
    return tuple(result)


def parts_of(recordings: Sequence[Recording], step_time_s: float, outside_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part, mean over ranks, scaled so that their sum is the step time.

    Args:
        recordings: of all ranks.
        step_time_s: of the whole step.
        outside_s: seconds of parts that happen outside micro-steps, which recordings count as attention and other.
    """
    parts_s = dict.fromkeys(PARTS, 0.0)
    for recording in recordings:
        by_kind = np.bincount(recording.kind_N, recording.end_N - recording.start_N, minlength=len(NAMES))
        for kind, part in PART_OF.items():
            parts_s[part] += float(by_kind[kind])
        for part, part_s in outside_s.items():
            parts_s[part] += part_s
            parts_s["attention"] -= part_s
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
