"""The observer's thread: figures of every step, what is dropped, and that nothing reaches the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from helpers.framework_batches import EXPERTS, MODEL, miles, random_sequences, vllm
from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.observe import JsonLines, Observer
from trimtab.observe.observation import LEAST_FREE_BYTES, Call, Observation
from trimtab.observe.observer import MOST_CALLS, OWN_MB
from trimtab.trace import read_trace


def sequences(seed: int = 0, count: int = 12) -> list[Array]:
    return random_sequences(np.random.default_rng(seed), count)


@contextmanager
def stopped(observer: Observer) -> Iterator[None]:
    """A context in which the thread reads nothing."""
    take, gate = Observation.take, threading.Event()

    def wait(observation: Observation, call: Call) -> Any:
        gate.wait(60)
        return take(observation, call)

    with mock.patch.object(Observation, "take", wait):
        try:
            yield
        finally:
            gate.set()
            assert observer.flush(300)


def figures_of(observer: Observer, batch: Any, step: int = 0) -> dict[str, float]:
    observer.record(batch, step)
    assert observer.flush(300)
    return observer.metrics()


def observed(**options: Any) -> Observer:
    return Observer("miles", ranks=4, model=MODEL, token_budget=64, **options)


def test_every_step_has_its_figures() -> None:
    found: list[tuple[int, Mapping[str, float]]] = []
    # A step that is not ended by its last call ends with the next step.
    calls = [(0, 4, False), (0, 8, True), (1, 4, False), (1, 8, True), (2, 4, False), (3, 4, True)]
    payload_bytes = [0] * 4
    with observed(sinks=[lambda figures, step: found.append((step, dict(figures)))]) as observer:
        for seed, (step, count, is_last) in enumerate(calls):
            batch = sequences(seed, count)
            payload_bytes[step] += sum(ids.nbytes for ids in batch)
            observer.record(miles(batch), step, last=is_last)
        assert observer.flush(300)
    assert [step for step, _ in found] == [0, 1, 2, 3]
    for step, figures in found:
        assert figures["rollout/moe/payload_mb"] == pytest.approx(payload_bytes[step] / 1e6)
        assert ("rollout/moe/renumber_recovers" in figures) == (step > 0)
        assert {"rollout/moe/idle_share", "rollout/moe/plan_gain", "perf/moe_observe_time"} <= set(figures)


def test_neither_the_constructor_nor_a_call_waits_for_kernels() -> None:
    """Compiling may take minutes."""
    compiled, warm_up = threading.Event(), Observation.warm_up

    def compile_slowly(observation: Observation, num_experts: int) -> None:
        assert compiled.wait(300)
        warm_up(observation, num_experts)

    with mock.patch.object(Observation, "warm_up", compile_slowly):
        observer = observed()
        observer.record(miles(sequences()), 0)
        assert observer.metrics() == {}
        compiled.set()
        assert observer.flush(300)
        assert observer.metrics()["rollout/moe/step"] == 0
        observer.close()


def test_metrics_are_those_of_the_last_step_and_are_given_once() -> None:
    with observed() as observer:
        assert observer.metrics() == {}
        for step in (5, 6):
            observer.record(miles(sequences(step)), step)
        assert observer.flush(300)
        assert observer.metrics()["rollout/moe/step"] == 6
        assert observer.metrics() == {}


@pytest.mark.parametrize("when", ["all", "some"])
def test_arrays_that_are_written_to_are_dropped(when: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    mine = sequences(1)
    changed = mine if when == "all" else mine[::3]
    before = [np.sort(ids, axis=2).tolist() for ids in mine]
    with observed(folder=tmp_path) as observer:
        with stopped(observer):
            observer.record(miles(mine), 0)
            for ids in changed:
                ids[:] = ids[:, :, ::-1].copy()
        assert observer.metrics()["rollout/moe/dropped_samples"] == len(changed)
    assert f"{len(changed)} of {len(mine)} in step 0: written to before the thread had read them" in caplog.text
    if when == "some":
        kept = [ids for place, ids in enumerate(before) if place % 3]
        trace = read_trace(tmp_path)
        assert sorted(trace.sequence(s).tolist() for s in range(trace.num_sequences)) == sorted(kept)


def test_text_for_which_there_is_no_room_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    # Lists, which can't be referenced weakly, of more than 1 MB each.
    responses = [
        {"prompt_token_ids": [1], "outputs": [{"token_ids": [1] * len(ids), "routed_experts": ids.tolist()}]}
        for ids in (np.tile(ids, (-(-4000 // len(ids)), 1, 1)) for ids in sequences(2))
    ]
    with Observer("vllm", ranks=4, model=MODEL, memory_mb=OWN_MB + 1) as observer:
        assert figures_of(observer, responses)["moe/dropped_samples"] == len(responses)
    assert "more text, lists and arrays of mapped files than may be held" in caplog.text


def test_calls_that_come_too_fast_are_counted() -> None:
    found: list[Mapping[str, float]] = []
    with observed(sinks=[lambda figures, step: found.append(dict(figures))]) as observer, stopped(observer):
        for step in range(MOST_CALLS + 9):
            observer.record(miles(sequences(step, 2)), step)
    assert len(found) == MOST_CALLS + 9
    # The thread has taken one.
    assert sum(figures["rollout/moe/dropped_samples"] for figures in found) == pytest.approx(2 * 8, abs=2)


def test_bad_samples_are_dropped_alone(caplog: pytest.LogCaptureFixture) -> None:
    mine = sequences(3)
    mine[4][1, 1] = EXPERTS + np.arange(mine[4].shape[2])
    with observed() as observer:
        assert figures_of(observer, miles(mine))["rollout/moe/dropped_samples"] == 1
    assert "they should be 0 to 15" in caplog.text


@pytest.mark.parametrize("room_mb", [1, 24])
def test_arrays_of_a_file_that_is_cut_are_copied_or_dropped(
    room_mb: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading them would end the process."""
    mine = [np.tile(ids, (-(-20_000 // len(ids)), 1, 1)) for ids in sequences(5, 4)]
    mapped = []
    for place, ids in enumerate(mine):
        np.save(tmp_path / f"{place}.npy", ids)
        mapped.append(np.asarray(np.load(tmp_path / f"{place}.npy", mmap_mode="r"))[1:])
    with observed(memory_mb=OWN_MB + room_mb) as observer:
        with stopped(observer):
            observer.record(miles(mapped), 0)
            for place in range(len(mine)):
                os.truncate(tmp_path / f"{place}.npy", 0)
        dropped = observer.metrics()["rollout/moe/dropped_samples"]
    assert (dropped > 0) == (room_mb == 1) == ("arrays of mapped files than may be held" in caplog.text)


def test_ten_thousand_bad_steps_are_ten_lines_at_most(caplog: pytest.LogCaptureFixture) -> None:
    good = sequences(6, 1)
    with observed() as observer:
        for step in range(10_000):
            bad = good[0].copy()
            bad[0, 0] = EXPERTS + step + np.arange(bad.shape[2])
            observer.record({0: "no batch", 1: miles([bad])}[step % 2], step)
            if step % 50 == 49:
                assert observer.flush(300)
        assert figures_of(observer, miles(good), 10_000)["rollout/moe/dropped_samples"] == 0
    assert 2 <= len(caplog.records) <= 10
    assert "more problems like this are not logged" in caplog.text


def test_a_step_that_is_no_step_loses_nothing_but_itself(caplog: pytest.LogCaptureFixture) -> None:
    steps: list[int] = []
    step: Any
    with observed(sinks=[lambda figures, step: steps.append(step)]) as observer:
        for step in (1, 1 << 70, -1, 2.5, None, np.int64(2)):
            observer.record(miles(sequences()), step)
        assert observer.flush(300)
    assert steps == [1, 2]
    assert "is left out (it should be from 0 to 2147483647)" in caplog.text


def test_writing_ends_at_its_limit_and_before_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Files of a few sequences each.
    with (
        mock.patch("trimtab.observe.observer.FILE_BYTES", 500),
        observed(folder=tmp_path / "limit", disk_mb=1) as observer,
    ):
        for step in range(20):
            assert figures_of(observer, miles(sequences(step, 90)), step)["rollout/moe/observed_share"] == 1
    assert 1e6 <= sum(file.stat().st_size for file in (tmp_path / "limit").iterdir()) < 1.1e6
    assert caplog.text.count("1 MB are written, all that disk_mb allows") == 1
    nearly_full = SimpleNamespace(free=LEAST_FREE_BYTES)
    with mock.patch("shutil.disk_usage", return_value=nearly_full), observed(folder=tmp_path / "full") as observer:
        figures_of(observer, miles(sequences()))
    assert "less than 1 GB of the disk would be free" in caplog.text
    assert not list((tmp_path / "full").iterdir())


def test_steps_after_an_error_have_figures(caplog: pytest.LogCaptureFixture) -> None:
    errors = [RuntimeError("one"), RuntimeError("another"), RuntimeError("one")]
    with observed() as observer:
        with mock.patch.object(Observation, "take", side_effect=errors):
            for step in range(3):
                assert figures_of(observer, miles(sequences(step)), step) == {}
        assert figures_of(observer, miles(sequences()), 3)["rollout/moe/step"] == 3
    assert [record.getMessage().partition("no figures ")[2] for record in caplog.records] == ["(one)", "(another)"]


def test_sinks_that_fail_or_end_their_thread_end_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failing = [mock.Mock(side_effect=OSError("no connection")), mock.Mock(side_effect=SystemExit(3))]
    with observed(sinks=[*failing, JsonLines(tmp_path / "figures.jsonl")]) as observer:
        for step in range(3):
            observer.record(miles(sequences(step)), step)
        assert observer.flush(300)
    assert len((tmp_path / "figures.jsonl").read_text().splitlines()) == 3
    assert [sink.call_count for sink in failing] == [1, 1]
    assert caplog.text.count("no connection") == 1
    assert caplog.text.count("gets no more figures") == 2


def test_a_folder_that_can_t_be_written_to_ends_writing_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with observed(folder=tmp_path / "trace") as observer:
        (tmp_path / "trace").rmdir()
        (tmp_path / "trace").write_text("in the way")
        for step in range(2):
            assert figures_of(observer, miles(sequences(step)), step)["rollout/moe/observed_share"] == 1
    assert caplog.text.count("no more routing is written") == 1


def test_a_sample_of_the_sequences_is_written(tmp_path: Path) -> None:
    with observed(folder=tmp_path, sample=0.25) as observer:
        assert figures_of(observer, miles(sequences(4, 200)))["rollout/moe/observed_share"] == 1
    assert 25 <= read_trace(tmp_path).num_sequences <= 75


def test_a_model_with_other_layers_gives_no_times(caplog: pytest.LogCaptureFixture) -> None:
    with Observer("vllm", ranks=4, model=replace(MODEL, moe_layers=2)) as observer:
        assert figures_of(observer, vllm(sequences()))["moe/dropped_samples"] == 12
    with Observer("vllm", ranks=4, num_experts=20) as observer:
        figures = figures_of(observer, vllm(sequences()))
    assert {"moe/idle_share", "moe/plan_recovers"} <= figures.keys()
    assert "moe/plan_gain" not in figures
    assert "no times are predicted (no model that comes with Trimtab has 20 experts, top-2" in caplog.text


@pytest.mark.parametrize("stalls", [False, True])
def test_the_end_waits_for_as_long_as_something_is_read(stalls: bool, caplog: pytest.LogCaptureFixture) -> None:
    """On a busy machine each step takes longer than the thread may make no progress for."""
    steps: list[int] = []
    begun, gate = threading.Event(), threading.Event()

    def slow_sink(figures: Mapping[str, float], step: int) -> None:
        steps.append(step)
        begun.set()
        gate.wait(60 if stalls else 0.6)

    with mock.patch("trimtab.observe.observer.PATIENCE_S", 3.0):
        observer = observed(sinks=[slow_sink])
        for step in range(6):
            observer.record(miles(sequences(step)), step)
        assert begun.wait(300)
        observer.close()
    assert (len(steps) < 6) == stalls == ("the thread has read nothing for 3 s" in caplog.text)
    gate.set()
    observer.close()


def test_a_closed_observer_takes_nothing_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    observer = observed()
    observer.close()
    observer.close()
    observer.record(miles(sequences()), 0)
    assert observer.metrics() == {}
    assert not observer.flush(1)
    assert "the observer was closed" in caplog.text
    assert not any(thread.name == "trimtab-observe" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framework": "verI"}, "unknown framework verI"),
        ({"ranks": 0}, "ranks: 0 should be a whole number of at least 1"),
        ({"ranks": 3}, "ranks: 3 don't divide the 16 experts"),
        ({"model": None}, "model or num_experts: one of them is needed"),
        ({"sample": 1.5}, "sample: 1.5 should be from 0 to 1"),
        ({"memory_mb": 3}, "memory_mb: 3 should be a whole number of at least 41"),
        ({"num_experts": 32}, "num_experts: 32, and the model small has 16"),
        ({"cluster": "h1000"}, "h1000"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"framework": "verl", "ranks": 4, "model": MODEL} | options
    with pytest.raises(InputError, match="(?s)" + message.replace(".", r"\.")):
        Observer(given.pop("framework"), **given)


def test_the_program_s_end_writes_what_is_waiting(tmp_path: Path) -> None:
    """Without `close`."""
    program = (
        "import numpy as np, trimtab.observe as o\n"
        f"observer = o.Observer('miles', ranks=2, num_experts=4, folder={str(tmp_path)!r})\n"
        "ids = np.zeros((9, 2, 2), np.int32); ids[..., 1] = 1\n"
        "observer.record([{'rollout_routed_experts': ids, 'tokens': [1] * 10}], 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert read_trace(tmp_path).num_tokens == 9
