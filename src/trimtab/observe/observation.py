"""`Observation`: reads what was handed over, counts and writes it, and makes the figures of each step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from trimtab.api.arguments import check_model
from trimtab.cluster import ClusterSpec, ModelSpec, default_model, model_like
from trimtab.errors import InputError
from trimtab.observe.sample_reader import ReadFigures, Sample, SampleReader
from trimtab.observe.step_counts import StepCounts
from trimtab.observe.step_figures import StepFigures
from trimtab.sizing.rollout_placement import RolloutPlacement
from trimtab.trace import ImportOptions, RoutingTrace, TraceWriter
from trimtab.trace.formats.normalise import Summary, normalise
from trimtab.trace.formats.records import Record
from trimtab.trace.message_text import reason

LATE = "handed over faster than the thread reads"
# Of a disk, what writing leaves free.
LEAST_FREE_BYTES = 1 << 30


class Call(NamedTuple):
    """What one call of `Observer.record` handed over.

    Attributes:
        step: the training step.
        samples: in the order in which they are read.
        late: samples that were not taken, since too many calls were waiting.
        is_last: whether the step has no more.
        seconds: of the call.
        payload_bytes: of all recorded ids.
    """

    step: int
    samples: list[Sample]
    late: int
    is_last: bool
    seconds: float
    payload_bytes: int


@dataclass
class _Step:
    """The step that is being read."""

    number: int
    read: ReadFigures = field(default_factory=ReadFigures)
    counts: StepCounts | None = None
    seconds: float = 0.0
    payload_bytes: int = 0


class Observation:
    """The work of the observer's thread.

    Args:
        options: facts of the model.
        cluster: of an expert-parallel group.
        model: for predicted times; None: the preset like the routing, if there is one.
        token_budget: tokens of a rank in a micro-step.
        writer: of the trace; None to write none.
        sample: the part of the sequences that is written.
        disk_bytes: most that is written.
        placement: of the rollout engine, made from every step; None to make none.
        complain: called with the kind of a problem, the problem, and a key: of those with equal keys the first is told.
    """

    def __init__(
        self,
        options: ImportOptions,
        cluster: ClusterSpec,
        model: ModelSpec | None,
        *,
        token_budget: int,
        writer: TraceWriter | None,
        sample: float,
        disk_bytes: int,
        complain: Callable[[str, str, str], None],
        placement: RolloutPlacement | None = None,
    ) -> None:
        self._reader = SampleReader(options)
        self._cluster, self._model, self._token_budget = cluster, model, token_budget
        self._writer, self._sample, self._complain = writer, sample, complain
        self._disk_bytes, self._placement = disk_bytes, placement
        self._figures: StepFigures | None = None
        self._step: _Step | None = None
        self._rng = np.random.default_rng(0)

    def take(self, call: Call) -> Iterator[tuple[int, dict[str, float]]]:
        """Read a call's samples. Yields the number and the figures of every step that has ended."""
        if self._step is not None and self._step.number != call.step:
            yield self._end(self._step)
        if self._step is None:
            self._step = _Step(call.step)
        step = self._step
        step.seconds += call.seconds
        step.payload_bytes += call.payload_bytes
        step.read.handed_over += len(call.samples) + call.late
        if call.late:
            step.read.failed[LATE] += call.late
        while call.samples:
            # Each is let go as soon as it is read.
            trace = self._reader.read(call.samples.pop(), step.read)
            if trace is not None:
                self._add(replace(trace, steps=np.full(trace.num_sequences, call.step, np.int32)), step)
        if call.is_last:
            yield self._end(step)

    def warm_up(self, num_experts: int) -> None:
        """Load compiled kernels, which the first step would wait for, with a few made-up tokens."""
        top_k = min(2, num_experts)
        ids_TLK = np.broadcast_to(np.arange(top_k, dtype=np.int32), (self._cluster.ranks, 1, top_k))
        (trace,) = normalise([Record(ids_TLK, "warm-up")], ImportOptions(num_experts), Summary())
        counts = StepCounts(self._cluster.ranks, 1, trace.part(0, 0))
        counts.add(trace)
        counted = counts.finish()
        assert counted is not None
        figures = StepFigures(self._cluster, default_model())
        for _ in range(2):
            figures.of(counted)

    def flush(self) -> None:
        """Write what is buffered."""
        self._write(TraceWriter.flush)

    def _add(self, trace: RoutingTrace, step: _Step) -> None:
        if self._figures is None:
            self._figures = StepFigures(self._cluster, self._model_of(trace))
        if step.counts is None:
            step.counts = StepCounts(self._cluster.ranks, self._token_budget, trace.part(0, 0))
        step.counts.add(trace)
        if self._placement is not None:
            self._placement.add(trace)
        if self._rng.random() < self._sample:
            self._write(lambda writer: writer.append(trace))

    def _write(self, write: Callable[[TraceWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            write(self._writer)
            if self._writer.written_bytes >= self._disk_bytes:
                raise InputError(f"{self._writer.written_bytes / 1e6:,.0f} MB are written, all that disk_mb allows")
            if shutil.disk_usage(self._writer.folder).free < LEAST_FREE_BYTES + self._writer.waiting_bytes:
                raise InputError("less than 1 GB of the disk would be free")
        except (InputError, OSError) as error:
            self._complain("writing", f"no more routing is written to {self._writer.folder} ({reason(error)})", "")
            self._writer = None

    def _model_of(self, trace: RoutingTrace) -> ModelSpec | None:
        try:
            if self._model is None:
                return model_like(trace.num_experts, trace.top_k, trace.num_layers)
            check_model("the routing", trace, self._model)
        except InputError as error:
            self._complain("model", f"no times are predicted ({reason(error)})", "model")
            return None
        return self._model

    def _end(self, step: _Step) -> tuple[int, dict[str, float]]:
        """The figures of a step that has no more samples."""
        self._step = None
        read, found = step.read, {}
        for why, count in read.failed.items():
            problem = f"some samples are dropped, {count:,} of {read.handed_over:,} in step {step.number}: {why}"
            self._complain("samples", problem, why)
        counted = None if step.counts is None else step.counts.finish()
        if counted is not None and step.counts is not None and self._figures is not None:
            found = self._figures.of(counted)
            if self._placement is not None:
                found |= self._placement.make(step.number)
            found["counted_share"] = 1 - step.counts.left_out / max(1, read.read)
        padding = read.summary.dropped["padding rows"]
        found |= {
            "observed_share": read.read / max(1, read.handed_over),
            "dropped_samples": float(read.handed_over - read.read),
            "padding_share": padding / max(1, padding + read.summary.tokens),
            "payload_mb": step.payload_bytes / 1e6,
            "observe_s": step.seconds,
        }
        if read.padding_peaks:
            found["padding_same_expert"] = float(np.mean(read.padding_peaks))
        return step.number, found
