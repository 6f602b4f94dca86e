"""`Observation`: reads what was handed over, counts and writes it, and makes the figures of each step."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from trimtab.api.model_choice import check_model
from trimtab.cluster import ClusterSpec, ModelSpec, default_model, model_like
from trimtab.errors import InputError
from trimtab.observe.borrowed import Sample, fingerprint
from trimtab.observe.step_figures import StepCounts, StepFigures
from trimtab.planner.rollout_placement import RolloutPlacement
from trimtab.trace import ImportOptions, RoutingTrace, TraceWriter
from trimtab.trace.formats.normalise import Summary, normalise
from trimtab.trace.formats.records import Dropped, Record
from trimtab.trace.message_text import reason

# Why a sample was not read; other reasons are messages of its reader.
LATE = "handed over faster than the thread reads"
FREED = "freed by the framework before the thread read them"
CHANGED = "written to before the thread had read them"
NO_ROOM = "more text, lists and arrays of mapped files than may be held"
# A sequence's ids in a trace; longer sequences are not read.
MOST_BYTES = 32 << 20
# Padding rows of a sample whose experts are looked at.
PADDING_ROWS = 16
TOO_LONG = f"longer than {MOST_BYTES >> 20} MB of ids"
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
    """The step that is being read.

    Attributes:
        seconds, payload_bytes: of its calls.
        handed_over, read: samples.
        failed: those that were not read, by reason.
        summary: rows by kind.
        padding_peaks: of each sample with padding, the part of its padding rows that use the same expert, mean over
            layers.
    """

    number: int
    counts: StepCounts | None = None
    seconds: float = 0.0
    payload_bytes: int = 0
    handed_over: int = 0
    read: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    summary: Summary = field(default_factory=Summary)
    padding_peaks: list[float] = field(default_factory=list)


class Observation:
    """The work of the observer's thread.

    Args:
        options: facts of the model. MoE layers that are not given are those of the first sample.
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
        self._options = options
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
        step.handed_over += len(call.samples) + call.late
        if call.late:
            step.failed[LATE] += call.late
        while call.samples:
            # Each is let go as soon as it is read.
            trace = self._read(call.samples.pop(), step)
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

    def _read(self, sample: Sample, step: _Step) -> RoutingTrace | None:
        """The sequences of a sample as a trace; None if it can't be read, which is counted."""
        owner = sample.owner.get()
        if owner is None:
            step.failed[FREED if sample.owner.can_be_weak else NO_ROOM] += 1
            return None
        summary = Summary()
        try:
            records = [_light(record) for record in sample.records(owner)]
            (trace,) = normalise(records, self._options, summary, "the sample")
            record = records[0]
            peak = _peak(record) if isinstance(record, Record) else None
            if sample.mark is not None and isinstance(record, Record) and fingerprint(record.block) != sample.mark:
                raise InputError(CHANGED)
        except Exception as error:
            # Of any kind: what is wrong with a sample must not end the observation.
            step.failed[reason(error)] += 1
            return None
        if self._options.moe_layers is None:
            self._options = replace(self._options, moe_layers=tuple(trace.layer_indices.tolist()))
        step.read += 1
        step.summary.add(summary)
        if peak is not None:
            step.padding_peaks.append(peak)
        return trace

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
        found: dict[str, float] = {}
        for why, count in step.failed.items():
            problem = f"some samples are dropped, {count:,} of {step.handed_over:,} in step {step.number}: {why}"
            self._complain("samples", problem, why)
        counted = None if step.counts is None else step.counts.finish()
        if counted is not None and step.counts is not None and self._figures is not None:
            found = self._figures.of(counted)
            if self._placement is not None:
                found |= self._placement.make(step.number)
            found["counted_share"] = 1 - step.counts.left_out / max(1, step.read)
        padding = step.summary.dropped["padding rows"]
        found |= {
            "observed_share": step.read / max(1, step.handed_over),
            "dropped_samples": float(step.handed_over - step.read),
            "padding_share": padding / max(1, padding + step.summary.tokens),
            "payload_mb": step.payload_bytes / 1e6,
            "observe_s": step.seconds,
        }
        if step.padding_peaks:
            found["padding_same_expert"] = float(np.mean(step.padding_peaks))
        return step.number, found


def _light(record: Record | Dropped) -> Record | Dropped:
    """The record without token ids. Raises InputError if it is too long."""
    if isinstance(record, Dropped):
        return record
    if record.ids.size > MOST_BYTES:
        raise InputError(TOO_LONG)
    return replace(record, tokens=())


def _peak(record: Record) -> float | None:
    """The part of padding tokens that use the same expert, of the most used one, mean over layers; None without any."""
    if record.rows is None:
        return None
    block = record.block
    is_padding = np.ones(len(block), bool)
    is_padding[record.rows] = False
    places = np.flatnonzero(is_padding)
    ids_NLK = block[places[:: max(1, len(places) // PADDING_ROWS)]]
    if not len(ids_NLK):
        return None
    count, layers, _ = ids_NLK.shape
    ids_NLK = np.sort(ids_NLK, axis=2).astype(np.int64)
    is_first = np.ones(ids_NLK.shape, bool)
    # K equal ids are one expert.
    is_first[:, :, 1:] = ids_NLK[:, :, 1:] != ids_NLK[:, :, :-1]
    ids_NLK -= ids_NLK.min()
    width = int(ids_NLK.max()) + 1
    cells = (np.arange(layers)[:, None] * width + ids_NLK)[is_first]
    used_LE = np.bincount(cells, minlength=layers * width).reshape(layers, width)
    return float((used_LE.max(axis=1) / count).mean())
