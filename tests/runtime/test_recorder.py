"""Recordings of real micro-steps, which do not change results."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.planned_steps import Step, make
from helpers.rank_tests import runs_on_ranks
from trimtab.runtime import Session
from trimtab.runtime.ranks import recorder as recorder_module
from trimtab.runtime.ranks.recorder import ACTIVITIES, EXPERTS, OTHER, REFRESHING, SUMMING, WAITING, Recorder


def test_activity_continues_after_a_nested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Counter(s=100)
    monkeypatch.setattr(recorder_module, "time", SimpleNamespace(perf_counter=lambda: float(now["s"])))
    recorder = Recorder(torch.device("cpu"))
    with recorder.micro_step(7):
        recorder.mark(EXPERTS, 2)
        now["s"] += 1
        with recorder.during(WAITING):
            now["s"] += 3
        now["s"] += 2
    recording = recorder.finish()
    seconds: Counter[tuple[int, int]] = Counter()
    spent_N = (recording.end_N - recording.start_N).astype(int)
    for kind, layer, spent in zip(recording.kind_N, recording.layer_N, spent_N, strict=True):
        seconds[int(kind), int(layer)] += spent
    assert +seconds == {(EXPERTS, 2): 3, (WAITING, -1): 3}
    assert np.array_equal(recording.start_N[1:], recording.end_N[:-1])
    assert [*recording.micro_steps] == [(7, 0.0, 6.0)]


@runs_on_ranks()
def test_layers_are_recorded_without_changing_results() -> None:
    session, model, _ = make()
    step = Step(0)
    assert step.plan.num_replicas
    step.apply(session)
    assert np.array_equal(session.rank_loads, step.plan.rank_loads(step.workload))

    def run() -> list[torch.Tensor]:
        step.run(session, model)
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
        expected = [(name, layer) for layer in range(4) for name in ("dispatch", "experts", "combine")]
        expected += [(f"{name}, backward", layer) for layer in (3, 2, 1, 0)
                     for name in ("combine", "experts", "dispatch")]  # fmt: skip
        assert [entry for entry, _ in groupby(names)] == expected


@runs_on_ranks()
def test_one_rank_may_record() -> None:
    """Every other layer has replicas, and all ranks ask for the same weights in the same order."""
    session = Session(num_experts=4, slots_per_rank=1, least_gain=-1.0, paths="message", max_rows_per_rank=10**6)
    experts = [torch.nn.ParameterList([torch.ones(8, 8), torch.ones(8, 8)]) for _ in range(6)]
    layers = [session.add_framework_layer(partial(lambda each: [list(each)], each)) for each in experts]
    tokens = np.arange(512)
    ids_NL = np.stack([tokens % 4 if layer % 2 == 0 else tokens * 0 + layer // 2 % 2 * 2 for layer in range(6)], axis=1)
    session.plan_micro_steps([ids_NL[:, :, None]] * 4)
    assert session.step_plan.num_replicas == 3 * 4
    choices = random.Random(3)
    for _ in range(14):
        index, trains, records = choices.randrange(4), choices.random() < 0.7, choices.random() < 0.5
        hidden = torch.ones(512, 8, requires_grad=True)
        with session.recording() if records and not session.rank else nullcontext(), torch.set_grad_enabled(trains):
            with session.micro_step(index):
                for place, layer in enumerate(layers):
                    routes = layer.routes()
                    assert routes is not None
                    hidden, call = layer.begin(hidden, torch.from_numpy(ids_NL[:, place, None]), routes)
                    if call.replicas.count:
                        hidden, _ = layer.use_replicas(hidden, call)
                    hidden = layer.end(hidden, call)
            if trains:
                hidden.sum().backward()
    session.close()
