"""The report of a training run: the same page as of a simulated step, from what was measured."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from trimtab.report.model import LoadMap, PolicyResult, Report, Timeline
from trimtab.rl.paired_comparison import MeasuredPolicy, speedup
from trimtab.rl.trainer import Trainer
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
)
from trimtab.simulator.clocks import PARTS
from trimtab.simulator.recorded_operations import LANES

# What ranks do together, so that none goes on before the last one has come.
MEETINGS = (DISPATCH, COMBINE, DISPATCH + BACKWARD, COMBINE + BACKWARD)
WAITING_FOR_RANKS = len(ACTIVITIES)
NAMES = (*ACTIVITIES, "waiting for other ranks")
PART_OF = {
    OTHER: "attention", OTHER + BACKWARD: "attention", EXPERTS: "experts", EXPERTS + BACKWARD: "experts",
    **dict.fromkeys(MEETINGS, "dispatch"), WAITING: "transfers", REFRESHING: "migration", SUMMING: "optimizer",
    WAITING_FOR_RANKS: "imbalance",
}  # fmt: skip
ABOUT = {
    "static": "contiguous homes, no replicas",
    "trimtab": "schedule, homes, replicas and split, planned from the recorded routing",
}
NOTES = (
    "Measured, not simulated. Times are medians of alternating repetitions on the same responses; parts and timelines "
    "are of one more repetition each, the parts scaled to the median.",
    "Attention and other is everything outside the expert layers, such as the loss.",
    "A rank that comes to a dispatch or combine before the others waits for them; what follows when all have come "
    "counts as dispatch or combine. Besides uneven experts, uneven attention and whatever else the machine does make "
    "ranks wait.",
    "Planning is not in the step time here: plans are made before, beside the rollout.",
)


def report_of(trainer: Trainer, results: dict[str, MeasuredPolicy]) -> Report:
    """The page of a comparison. Rank 0 alone can make it."""
    static, trimtab = results["static"], results["trimtab"]
    split = {name: with_waiting(result.recordings) for name, result in results.items()}
    memory = memory_of(trainer)
    policies = []
    for name, result in results.items():
        M, L, _ = result.loads_MLR.shape
        # The pool and the mirror are there for the other policy's sake in a run that has no replicas.
        pool = {
            "replica pool": float(result.plan.pool_bytes),
            "host mirror of the node": float(result.plan.mirror_bytes),
        }
        policies.append(
            PolicyResult(
                name=name,
                about=ABOUT[name],
                step_time_s=result.median_s,
                speedup=speedup(static, result),
                fraction_of_balanced=None,
                max_over_mean=1 + result.max_vio,
                parts_s=parts_of(split[name], result.median_s),
                memory_bytes=memory | (pool if result.plan.replicas else {}),
                replicas_per_instance=result.plan.replicas / (M * L),
            )
        )
    where = LANES.index("network" if trainer.session.topology.ranks_per_node < trainer.num_ranks else "node link")
    return Report(
        title=f"Trimtab, training run {trainer.config.out.name}",
        answer=_answer(static, trimtab),
        facts=_facts(trainer, results),
        policies=tuple(policies),
        layer_names=tuple(str(layer) for layer in trainer.layer_indices.tolist()),
        before=LoadMap("static", static.loads_MLR),
        after=LoadMap("trimtab", trimtab.loads_MLR),
        timelines=tuple(timeline_of(name, recordings, where) for name, recordings in split.items()),
        notes=NOTES,
    )


def _answer(static: MeasuredPolicy, trimtab: MeasuredPolicy) -> str:
    return (
        f"Trimtab makes recompute and update {speedup(static, trimtab):.2f} times as fast as static expert "
        f"parallelism: the busiest rank has {trimtab.max_vio:.1%} more than the mean instead of {static.max_vio:.1%}."
    )


def _facts(trainer: Trainer, results: dict[str, MeasuredPolicy]) -> tuple[tuple[str, str], ...]:
    config, static, trimtab = trainer.config, results["static"], results["trimtab"]
    M, L, R = trimtab.loads_MLR.shape
    top_k = trainer.model_config.num_experts_per_tok
    tokens = int(trimtab.loads_MLR[:, 0].sum()) // top_k
    device = torch.cuda.get_device_name() if trainer.device.type == "cuda" else f"CPU, {platform.machine()}"
    return (
        (
            "model",
            f"{trainer.model_config.model_type}, {L} MoE layers, {trainer.session.num_experts} experts, top-{top_k}",
        ),
        ("ranks", f"{R}, {trainer.session.topology.ranks_per_node} a node"),
        ("device", device),
        ("step", f"{tokens:,} tokens, {len(static.loads_MLR)} micro-steps under static, {M} under trimtab"),
        ("token budget", f"{config.token_budget:,} of a rank in a micro-step"),
        ("slots", f"{config.slots} a rank"),
        ("homes moved", f"{trimtab.plan.homes_moved} of {L * trainer.session.num_experts} experts"),
        ("planning", f"{1e3 * trimtab.plan.planning_s:.1f} ms"),
        ("pairs", str(len(static.step_s))),
        ("torch", torch.__version__),
    )


def memory_of(trainer: Trainer) -> dict[str, float]:
    """Bytes of what training keeps on this rank, by use."""
    state = [value for values in trainer.optimizer.state.values() for value in values.values()]
    parameters = float(sum(parameter.nbytes for parameter in trainer.model.parameters()))
    return {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer state": float(sum(value.nbytes for value in state if isinstance(value, torch.Tensor))),
    }


def with_waiting(recordings: Sequence[Recording]) -> tuple[Recording, ...]:
    """Recordings of all ranks in which dispatch and combine begin when the last rank has come.

    What was recorded of them before counts as waiting for other ranks. Ranks meet in the same order everywhere, so the
    n-th meeting of one rank is that of all others.
    """
    places = [np.flatnonzero(np.isin(recording.kind_N, MEETINGS)) for recording in recordings]
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


def parts_of(recordings: Sequence[Recording], step_time_s: float) -> dict[str, float]:
    """Seconds by part, mean over ranks, so scaled that they add up to the step's time. Every rank is busy or waits."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for recording in recordings:
        by_kind = np.bincount(recording.kind_N, recording.end_N - recording.start_N, minlength=len(NAMES))
        for kind, part in PART_OF.items():
            seconds[part] += float(by_kind[kind])
    total = sum(seconds.values())
    return {part: step_time_s * value / total for part, value in seconds.items() if value > 0}


def timeline_of(name: str, recordings: Sequence[Recording], meeting_lane: int) -> Timeline:
    """The update of the micro-step whose time is the median one.

    Args:
        meeting_lane: index into `LANES` of what dispatch and combine go over.
    """
    begins = np.array([[begin for _, begin, _ in r.micro_steps] for r in recordings]).min(axis=0)
    ends = np.array([[end for _, _, end in r.micro_steps] for r in recordings]).max(axis=0)
    # The first half of all passes are recompute, the others updates.
    updates = np.arange(len(begins) // 2, len(begins))
    chosen = int(updates[np.argsort((ends - begins)[updates], kind="stable")[(len(updates) - 1) // 2]])
    columns = []
    for rank, recording in enumerate(recordings):
        index, begin, end = recording.micro_steps[chosen]
        inside = (recording.start_N >= begin) & (recording.end_N <= end) & (recording.end_N > recording.start_N)
        kind_N = recording.kind_N[inside]
        lane_N = np.where(np.isin(kind_N, MEETINGS), meeting_lane, LANES.index("compute"))
        times = (recording.start_N[inside] - begins[chosen], recording.end_N[inside] - begins[chosen])
        columns.append((kind_N, lane_N, np.full(len(kind_N), rank), recording.layer_N[inside], *times))
    kind_N, lane_N, rank_N, layer_N, start_N, end_N = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Timeline(
        f"{name}, update of micro-step {index}", NAMES, kind_N.astype(np.uint8), lane_N.astype(np.uint8),
        rank_N.astype(np.int16), layer_N.astype(np.int16), start_N, end_N,
    )  # fmt: skip
