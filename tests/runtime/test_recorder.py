"""Recordings of real micro-steps, which do not change results."""

from __future__ import annotations

import time
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist

from helpers.moe_model import Shape, TinyMoE
from helpers.random_plans import random_plan, random_schedule, random_trace
from helpers.rank_pool import on_ranks
from trimtab.planner import Placement, Workload
from trimtab.runtime import Session
from trimtab.runtime.ranks.recorder import ACTIVITIES, EXPERTS, OTHER, REFRESHING, SUMMING, WAITING, Recorder

SHAPE = Shape(layers=3, experts=8, top_k=2, hidden=16, width=8)


def test_activity_continues_after_a_nested_one() -> None:
    recorder = Recorder(torch.device("cpu"))
    with recorder.micro_step(7):
        recorder.mark(EXPERTS, 2)
        time.sleep(0.01)
        with recorder.during(WAITING):
            time.sleep(0.03)
        time.sleep(0.02)
    recording = recorder.finish()
    seconds = {(int(k), int(layer)): 0.0 for k, layer in zip(recording.kind_N, recording.layer_N, strict=True)}
    for kind, layer, start, end in zip(
        recording.kind_N, recording.layer_N, recording.start_N, recording.end_N, strict=True
    ):
        seconds[int(kind), int(layer)] += end - start
    assert seconds[EXPERTS, 2] >= 0.03
    assert seconds[WAITING, -1] >= 0.03
    assert np.array_equal(recording.start_N[1:], recording.end_N[:-1])
    ((index, begin, end),) = recording.micro_steps
    assert index == 7
    assert 0 <= begin <= end - 0.06
    assert end <= recording.end_N[-1]


def record_steps() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    session = Session(num_experts=SHAPE.experts)
    model = TinyMoE(SHAPE, torch.float32, run_block="plain")
    model.share(session)
    trace = random_trace(rng, num_sequences=8, max_length=12, num_layers=3, num_experts=8, top_k=2)
    schedule = random_schedule(rng, 8, num_ranks=2, num_micro_steps=2)
    workload = Workload.from_trace(trace, schedule)
    plan = random_plan(rng, workload, schedule, slots=2, placement=Placement.contiguous(3, 8, 2))
    assert plan.num_replicas
    session.apply_step_plan(plan, trace.select(schedule.sequences_of(session.rank)))
    assert np.array_equal(session.rank_loads, plan.rank_loads(workload))
    tokens = torch.from_numpy(rng.integers(0, SHAPE.vocab, trace.num_tokens))

    def run() -> list[torch.Tensor]:
        for index in range(2):
            mine = np.flatnonzero((schedule.rank == session.rank) & (schedule.micro_step == index))
            starts = trace.sequence_starts
            rows = np.concatenate([*(np.arange(starts[s], starts[s + 1]) for s in mine), np.empty(0, np.int64)])
            with session.micro_step(index):
                model(tokens[torch.from_numpy(rows)]).sum().backward()
        session.finish_gradients(model.replicated())
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return gradients

    unseen = run()
    dist.barrier()
    with session.recording() as recorder:
        seen = run()
        session.take_metrics()
        again = run()
        recording = recorder.finish()
    assert session.counters.recorder is None
    for other in (seen, again, run()):
        assert all(torch.equal(a, b) for a, b in zip(unseen, other, strict=True))
    assert len(recorder.finish().kind_N) == len(recording.kind_N) + 1
    assert [index for index, _, _ in recording.micro_steps] == [0, 1, 0, 1]
    assert (np.bincount(recording.kind_N, minlength=len(ACTIVITIES))[[REFRESHING, SUMMING]] >= 2).all()
    for _, begin, end in recording.micro_steps:
        inside = (recording.start_N >= begin) & (recording.end_N <= end)
        done = zip(recording.kind_N[inside].tolist(), recording.layer_N[inside].tolist(), strict=True)
        names = [(ACTIVITIES[kind], layer) for kind, layer in done if kind not in (WAITING, OTHER, OTHER + 4)]
        expected = [(name, layer) for layer in range(3) for name in ("dispatch", "experts", "combine")]
        expected += [(f"{name}, backward", layer) for layer in (2, 1, 0)
                     for name in ("combine", "experts", "dispatch")]  # fmt: skip
        assert [entry for entry, _ in groupby(names)] == expected


def test_layers_are_recorded_without_changing_results() -> None:
    on_ranks(record_steps, (), ranks=2)
