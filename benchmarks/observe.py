"""`python -m benchmarks.observe`: what observing costs the training thread, and how much it misses.

Hand the routing of a step (48 layers, top-8 of 128 experts) to an observer, as slime and verl hold it, and time the
call, the observer's own thread, and a loop in Python beside it.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.harness import Figures, main
from benchmarks.routing import LAYERS, TOP_K, long_responses, sizes_of, sizes_text
from benchmarks.tables import Columns, figure_table, named_rows, quantity
from trimtab.array_type import Array
from trimtab.cli.options import add_options, positive
from trimtab.cli.parser import Parser
from trimtab.observe import Observer
from trimtab.report.number_text import bytes_text, seconds
from trimtab.trace import RoutingTrace, write_trace

RANKS = 16
# The part of the sequences that is written.
SAMPLE = 0.05
# Another thread's memory and progress are looked at so often.
INTERVAL_S = 0.002


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--tokens", type=positive, default=1_000_000, help="tokens of the step")
    add_options(parser, "--rounds", default=5)


def run_benchmark(tokens: int, rounds: int, seed: int = 0) -> Figures:
    """Hand over a step's routing, in turns as slime has it, as verl has it, and as slime has it and frees it at once.

    Args:
        tokens: approximate number of tokens of the step.
        rounds: counted steps of each kind. They follow one that is not counted, in which libraries are loaded.
        seed: of the routing.
    """
    trace = long_responses(tokens, seed=seed)
    sequences = [trace.sequence(index) for index in range(trace.num_sequences)]
    kinds = {
        "list, int32 (slime)": ("slime", _samples, False),
        "padded, int16 (verl)": ("verl", _batch, False),
        "list, freed at once": ("slime", _samples, True),
    }
    _load_arrow(trace.part(0, min(16, trace.num_sequences)))
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for name in track(kinds, "bench observe", transient=True):
            framework, make, frees = kinds[name]
            with Observer(
                framework, ranks=RANKS, model="qwen3-30b-a3b", folder=Path(folder) / framework, sample=SAMPLE
            ) as observer:
                content = [make(sequences)]
                for step in range(rounds + 1):
                    runs[name].append(_step(observer, content, step, frees=frees))
                    if frees:
                        content = [make(sequences)]
    pairs = trace.num_tokens * LAYERS
    return {
        "schema": "trimtab-bench-observe-1",
        **sizes_of(trace),
        "sample_written": SAMPLE,
        "kinds": {name: _summary(found, pairs) for name, found in runs.items()},
    }


def _summary(runs: list[dict[str, float]], pairs: int) -> Figures:
    """Figures of one kind from its steps; the first is not counted.

    `record_ms` is of the call on the training thread; `read_s` until its figures are there; `held_bytes` the most
    resident memory while it was read, above that before the call; `training_speed` the work of the training thread
    meanwhile, divided by that without an observer; `observed_share` the part of the samples that were read.
    """
    median = {name: statistics.median(run[name] for run in runs[1:]) for name in runs[0]}
    return {
        "record_ms": 1e3 * median["record_s"],
        "record_us_per_1000_pairs": 1e9 * median["record_s"] / pairs,
        "read_s": median["read_s"],
        "held_bytes": max(run["held_bytes"] for run in runs[1:]),
        "held_bytes_first": runs[0]["held_bytes"],
        "training_speed": median["training_speed"],
        "observed_share": median["observed_share"],
    }


def _samples(sequences: list[Array]) -> list[dict[str, Any]]:
    """What slime's `Sample`s hold."""
    return [
        {"rollout_routed_experts": ids.astype(np.int32), "tokens": range(len(ids) + 1), "response_length": len(ids)}
        for ids in sequences
    ]


def _batch(sequences: list[Array]) -> dict[str, Array]:
    """A padded batch as verl has it, in int16."""
    width = max(map(len, sequences)) + 1
    routes_BTLK = np.zeros((len(sequences), width, LAYERS, TOP_K), np.int16)
    mask_BT = np.zeros((len(sequences), width), np.int64)
    for row, ids in enumerate(sequences):
        routes_BTLK[row, : len(ids)] = ids
        mask_BT[row, : len(ids) + 1] = 1
    return {"routed_experts": routes_BTLK, "attention_mask": mask_BT}


def _step(observer: Observer, content: list[Any], step: int, *, frees: bool) -> dict[str, float]:
    alone = _work_rate(0.2)
    before = _resident()
    start = time.perf_counter()
    observer.record(content[0], step)
    record_s = time.perf_counter() - start
    if frees:
        content.clear()
        _return_free_memory()
    with _peak_memory() as peak:
        done, beside = {}, []
        while not (done := observer.metrics()):
            beside.append(_work_rate(0.05))
    if frees:
        # What was freed at once was there before the call.
        _return_free_memory()
        before = _resident()
    share = next(value for name, value in done.items() if name.endswith("observed_share"))
    return {
        "record_s": record_s,
        "read_s": time.perf_counter() - start,
        "held_bytes": max(peak) - before,
        "training_speed": statistics.mean(beside) / alone if beside else 1.0,
        "observed_share": share,
    }


def _work_rate(duration: float) -> float:
    """Rounds a second of Python for 1 ms and waiting for 1 ms, as a training loop that waits for its kernels."""
    count, working, start = 0, 0.0, time.perf_counter()
    while time.perf_counter() - start < duration:
        begun = time.perf_counter()
        while (passed := time.perf_counter() - begun) < 1e-3:
            sum(range(100))
            count += 1
        working += passed
        time.sleep(1e-3)
    return count / working


@contextmanager
def _peak_memory() -> Iterator[list[int]]:
    """A context with a list of resident bytes, looked at again and again by another thread."""
    found, done = [_resident()], threading.Event()

    def watch() -> None:
        while not done.wait(INTERVAL_S):
            found.append(_resident())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def _return_free_memory() -> None:
    """Let malloc give free memory back, where it is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _load_arrow(trace: RoutingTrace) -> None:
    """Let Arrow and zstd reserve their memory, some 60 MB, which any use of them does."""
    with tempfile.TemporaryDirectory() as folder:
        write_trace(trace, Path(folder) / "first.parquet")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def print_figures(figures: Figures, console: Console) -> None:
    """Print one line per kind of batch."""
    columns: Columns = {
        "batch": "{name}",
        "record()": "{record_ms:.1f} ms",
        "of 1,000 (token, layer) pairs": "{record_us_per_1000_pairs:.2f} us",
        "read after": quantity("read_s", seconds),
        "samples read": "{observed_share:.1%}",
        "memory held": quantity("held_bytes", bytes_text),
        "Python speed meanwhile": "{training_speed:.2f}",
    }
    console.print(figure_table(sizes_text(figures), columns, named_rows(figures["kinds"])))


if __name__ == "__main__":
    main("benchmarks.observe")
