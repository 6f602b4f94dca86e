"""`Observer`: what imbalance costs in a run of any framework, from its recorded routing, without touching the run."""

from __future__ import annotations

import atexit
import logging
import operator
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trimtab.analysis.trace_counts import DEFAULT_BUDGET
from trimtab.api.model_choice import ModelSource
from trimtab.cluster import ModelSpec, load_cluster, load_model
from trimtab.errors import InputError
from trimtab.kinds import at_least, choice, positive
from trimtab.observe.borrowed import Room
from trimtab.observe.frameworks import FRAMEWORKS
from trimtab.observe.observation import Call, Observation
from trimtab.observe.sinks import Sink
from trimtab.planner.rollout_placement import RolloutPlacement
from trimtab.rank_variables import rank_variable
from trimtab.trace import ImportOptions, TraceWriter
from trimtab.trace.message_text import clip, reason

# Memory of an observer, and the part of it for counts, the sequence that is read, and the file that is written.
MEMORY_MB, OWN_MB = 64, 40
# Most that is written of a process.
DISK_MB = 10_000
# Ids of a trace file.
FILE_BYTES = 4 << 20
# Calls that may wait for the thread.
MOST_CALLS = 64
# Seconds without progress of the thread after which the end of the program no longer waits for it.
PATIENCE_S = 30.0
# Of the thread: below that of the training's threads.
NICENESS = 10
# Problems that are logged of a kind, and of all kinds.
MOST_OF_A_KIND, MOST_PROBLEMS = 3, 10

log = logging.getLogger("trimtab")


class Observer:
    """Reads recorded routing on a thread of its own, writes it as a trace, and computes what imbalance costs.

    `record` takes a batch as the framework holds it and returns at once: at most 1 us for 1,000 (token, layer) pairs.
    The thread reads the framework's own arrays while they exist; of those that the framework frees at once, up to
    `memory_mb` are kept. What can't be read in time is dropped, and counted in the figures. Nothing that goes wrong
    here raises in the run: the first problems of a kind are logged.

    Arrays must not be written to until they are read. Where that happens, the samples concerned are dropped.

    Args:
        framework: verl, slime, miles, nemo-rl, skyrl, roll, ms-swift, trl, vllm or sglang: how batches look, and what
            figures are called.
        ranks: of an expert-parallel group.
        model: a `ModelSpec`, a preset's name or hub id, a config.json or a checkpoint. By default the preset like the
            routing, if `num_experts` is given.
        num_experts: experts of a layer; needed without `model`.
        ranks_per_node: by default the cluster's, or all.
        token_budget: tokens of a rank in a micro-step, such as verl's `ppo_max_token_len_per_gpu`.
        cluster: kind of nodes, for predicted times: a preset's name or a TOML file.
        folder: where the trace is written; none without it. `trimtab analyze FOLDER` reads it.
        sample: the part of the sequences that is written, 0 to 1; figures are of all.
        rank: of this process, for names of files; by default RANK of the environment, or 0.
        sinks: called with the figures of every step, on the thread.
        memory_mb: most memory that the observer holds.
        disk_mb: most that is written to the folder. Writing also ends before less than 1 GB of the disk is free.
        placement: makes a placement for the rollout engine from every step; call its `sync` before the engine loads the
            weights of the next step.

    Raises:
        InputError: one line, if an argument is out of range, or the model has other experts.
    """

    def __init__(
        self,
        framework: str,
        *,
        ranks: int,
        model: ModelSource | None = None,
        num_experts: int | None = None,
        ranks_per_node: int | None = None,
        token_budget: int = DEFAULT_BUDGET,
        cluster: str | os.PathLike[str] = "h100x8",
        folder: str | os.PathLike[str] | None = None,
        sample: float = 1.0,
        rank: int | None = None,
        sinks: Sequence[Sink] = (),
        memory_mb: int = MEMORY_MB,
        disk_mb: int = DISK_MB,
        placement: RolloutPlacement | None = None,
    ) -> None:
        choice(*FRAMEWORKS).check("framework", framework)
        at_least(OWN_MB + 1).check("memory_mb", memory_mb)
        for name, value in {"ranks": ranks, "token_budget": token_budget, "disk_mb": disk_mb}.items():
            positive.check(name, value)
        for name, optional in {"num_experts": num_experts, "ranks_per_node": ranks_per_node}.items():
            if optional is not None:
                positive.check(name, optional)
        if not 0 <= sample <= 1:
            raise InputError(f"sample: {sample!r} should be from 0 to 1")
        spec = model if isinstance(model, ModelSpec) or model is None else load_model(model)
        experts = num_experts or (spec.num_experts if spec else None)
        if experts is None:
            raise InputError("model or num_experts: one of them is needed")
        if spec is not None and experts != spec.num_experts:
            raise InputError(f"num_experts: {experts}, and the model {spec.name} has {spec.num_experts}")
        if experts % ranks:
            raise InputError(f"ranks: {ranks} don't divide the {experts} experts")
        if placement is not None:
            placement.check(experts)
        self._framework = FRAMEWORKS[framework]
        # A sample of nothing is not written.
        self._options = replace(_options(spec, experts), sampled=sample or 1.0)
        self._room = Room((memory_mb - OWN_MB) << 20)
        self._sinks = list(sinks)
        self._complaints: Counter[str] = Counter()
        self._complained: set[str] = set()
        self._num_experts = experts
        self._lock = threading.Lock()
        self._ready: dict[str, float] = {}
        # Samples of the call that the thread reads, until they are read.
        self._reading: list[Any] = []
        name = f"rank-{rank_variable('RANK', 0) if rank is None else rank}"
        self._observation = Observation(
            self._options,
            load_cluster(cluster, ranks=ranks, ranks_per_node=ranks_per_node),
            spec,
            token_budget=token_budget,
            writer=None if folder is None else TraceWriter(folder, name=name, file_bytes=FILE_BYTES),
            sample=sample,
            disk_bytes=disk_mb * 1_000_000,
            complain=self._complain,
            placement=placement,
        )
        # An event is set when all before it is read; None ends the thread.
        self._calls: queue.SimpleQueue[Call | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="trimtab-observe", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def record(self, batch: Any, step: int, *, last: bool = True) -> None:
        """Hand over recorded routing. Returns at once, and never raises.

        Args:
            batch: as the framework holds it; `docs/observe.md` says what that is for each framework.
            step: number of the training step.
            last: False if the step's routing comes in several calls and this is not the last one.
        """
        if not self._thread.is_alive():
            self._complain("closed", "the observer was closed; nothing more is read")
            return
        try:
            step = operator.index(step)
            if not 0 <= step < 1 << 31:
                raise InputError(f"it should be from 0 to {(1 << 31) - 1}")
        except Exception as error:
            self._complain("step", f"step {clip(repr(step))} is left out ({reason(error)})", "step")
            return
        start = time.perf_counter()
        samples, late, payload_bytes = [], 0, 0
        try:
            samples = self._framework.samples(batch, self._room, self._options)
            payload_bytes = sum(sample.nbytes for sample in samples)
            if self._calls.qsize() >= MOST_CALLS:
                samples, late = [], len(samples)
            # If only some can be read, they should be any.
            order = np.random.default_rng(step).permutation(len(samples))
            samples = [samples[place] for place in order.tolist()]
        except Exception as error:
            self._complain("batch", f"a batch can't be read ({reason(error)})")
        self._calls.put(Call(step, samples, late, last, time.perf_counter() - start, payload_bytes))

    def metrics(self) -> dict[str, float]:
        """The figures of the last step that is done, by the framework's names; empty if they were taken already.

        They are ready some time after `record`; one of them is the step that they are of.
        """
        with self._lock:
            found, self._ready = self._ready, {}
        return found

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was handed over is read, and written. Not for the training loop.

        Returns:
            Whether that took at most `timeout` seconds.
        """
        done = threading.Event()
        self._calls.put(done)
        return done.wait(timeout) if self._thread.is_alive() else False

    def close(self) -> None:
        """Read and write what was handed over, and end the thread. Programs call it when they end.

        It gives up when the thread has read nothing for 30 s.
        """
        atexit.unregister(self.close)
        self._calls.put(None)
        before = None
        # Calls that wait for the thread, and samples of the call that it reads.
        while self._thread.is_alive() and (left := (self._calls.qsize(), len(self._reading))) != before:
            before = left
            self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self._complain("closed", f"the thread has read nothing for {PATIENCE_S:.0f} s; the rest is left out")

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        """The thread's work. No error ends it, not even `sys.exit` in a sink."""
        try:
            if hasattr(os, "setpriority"):
                # On Linux that is of the thread alone.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            self._observation.warm_up(self._num_experts)
        except BaseException as error:
            self._complain("start", f"the thread's start failed ({reason(error)})")
        while (call := self._calls.get()) is not None:
            try:
                if isinstance(call, threading.Event):
                    self._observation.flush()
                    call.set()
                    continue
                start, self._reading = time.thread_time(), call.samples
                for step, figures in self._observation.take(call):
                    self._publish(step, figures | {"observe_thread_s": time.thread_time() - start})
            except BaseException as error:
                self._complain("figures", f"a step has no figures ({reason(error)})")
        self._observation.flush()

    def _publish(self, step: int, figures: dict[str, float]) -> None:
        named = {self._framework.name_of(name): value for name, value in figures.items()}
        with self._lock:
            self._ready = named | {self._framework.name_of("step"): float(step)}
        for sink in list(self._sinks):
            try:
                sink(named, step)
            except BaseException as error:
                self._sinks.remove(sink)
                self._complain("sink", f"{type(sink).__name__} gets no more figures ({reason(error)})")

    def _complain(self, kind: str, problem: str, key: str = "") -> None:
        """Log a problem if it is one of the first of its kind, and new.

        Args:
            key: equal for problems of which the first is enough; by default the problem itself.
        """
        with self._lock:
            is_known = (key or problem) in self._complained
            if is_known or self._complaints[kind] >= MOST_OF_A_KIND or self._complaints.total() >= MOST_PROBLEMS:
                return
            self._complained.add(key or problem)
            self._complaints[kind] += 1
            is_last = self._complaints[kind] == MOST_OF_A_KIND or self._complaints.total() == MOST_PROBLEMS
        log.warning("observe: %s%s", problem, "; more problems like this are not logged" if is_last else "")


def _options(model: ModelSpec | None, num_experts: int) -> ImportOptions:
    """What is known of the model."""
    if model is None:
        return ImportOptions(num_experts=num_experts)
    layers = model.moe_layers + model.dense_layers
    return ImportOptions(num_experts, layers, model.top_k, model.moe_layer_indices or None, model.name)
