"""The report of a training run: the page of a simulated step, with measured times."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from trimtab.planner.plan.pass_times import PARTS
from trimtab.report.model import LoadMap, PolicyResult, Report, Timeline
from trimtab.report.number_text import seconds
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
from trimtab.simulator.recorded_operations import LANES

# Collectives: no rank continues before the last one has started.
COLLECTIVES = (DISPATCH, COMBINE, DISPATCH + BACKWARD, COMBINE + BACKWARD)
WAITING_FOR_RANKS = len(ACTIVITIES)
NAMES = (*ACTIVITIES, "waiting for other ranks")
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
    "Measured, not simulated. Times are medians of alternating repetitions on the same responses; parts and timelines "
    "are of one more repetition each, the parts scaled to the median.",
    "Attention and other is everything outside the expert layers, such as the loss.",
    "A rank that reaches a dispatch or combine before the others waits for them; the time after the last rank has "
    "reached it counts as dispatch or combine. Ranks also wait because of uneven attention and other processes on the "
    "machine.",
    "Planning is not part of the step time here: plans are made before the step, during the rollout.",
)


def report_of(trainer: Trainer, results: dict[str, MeasuredPolicy]) -> Report:
    """The page of a comparison. Only rank 0 has the recordings for it."""
    static, trimtab = results["static"], results["trimtab"]
    split = {name: with_waiting(result.recordings) for name, result in results.items()}
    memory = memory_of(trainer)
    policies = []
    for name, result in results.items():
        M, L, _ = result.loads_MLR.shape
        # Pool and mirror exist in the whole run, but only a policy with replicas needs them.
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
        ("ranks", f"{R}, {trainer.session.topology.ranks_per_node} per node"),
        ("device", device),
        ("step", f"{tokens:,} tokens, {len(static.loads_MLR)} micro-steps under static, {M} under trimtab"),
        ("token budget", f"{config.token_budget:,} per rank and micro-step"),
        ("slots", f"{config.slots} per rank"),
        ("homes moved", f"{trimtab.plan.homes_moved} of {L * trainer.session.num_experts} experts"),
        ("planning", seconds(trimtab.plan.planning_s)),
        ("pairs", str(len(static.step_s))),
        ("torch", torch.__version__),
    )


def memory_of(trainer: Trainer) -> dict[str, float]:
    """Bytes of training state on this rank, by use."""
    state = [value for values in trainer.optimizer.state.values() for value in values.values()]
    parameters = float(sum(parameter.nbytes for parameter in trainer.model.parameters()))
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


def parts_of(recordings: Sequence[Recording], step_time_s: float) -> dict[str, float]:
    """Seconds by part, mean over ranks, scaled so that their sum is the step time."""
    parts_s = dict.fromkeys(PARTS, 0.0)
    for recording in recordings:
        by_kind = np.bincount(recording.kind_N, recording.end_N - recording.start_N, minlength=len(NAMES))
        for kind, part in PART_OF.items():
            parts_s[part] += float(by_kind[kind])
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
