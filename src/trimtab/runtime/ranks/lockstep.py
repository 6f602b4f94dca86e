"""`Lockstep`: checks that all ranks make the same calls in the same order; an error names the ranks and their calls.

Each rank keeps a journal of its calls of the session and of every exchange of every layer. The ranks compare digests
of their journals when a micro-step begins, when gradients are finished and when a step is planned. A rank that waits
longer than `PATIENCE_S` publishes the end of its journal in the store of the process group, and compares it with what
the other ranks published there. This finds ranks that wait for each other in different calls.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import queue
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from trimtab.array_type import Array
from trimtab.errors import InputError, RanksDisagreeError
from trimtab.runtime.ranks.topology import Topology

# Seconds after which a rank that waits looks at what the others do.
PATIENCE_S = 5.0
# Seconds that a rank whose exchange failed waits for the others to publish what they did.
GRACE_S = 2.0
# Calls that a rank remembers.
REMEMBERED = 512

CALLS = (
    "micro_step({step})", "live_micro_step()", "finish_gradients()", "plan()", "plan_sequences()", "apply_plan()",
    "move()",
    "dispatch of MoE layer {layer} {where}", "combine of MoE layer {layer} {where}",
    "combine of MoE layer {layer} {where}, backward{of}", "dispatch of MoE layer {layer} {where}, backward{of}",
    "dispatch of MoE layer {layer} {where} without gradients", "counts of MoE layer {layer}",
    "gradients of replicas of MoE layer {layer} {where}{of}", "clip_gradients()", "logical_state_dict()",
    "optimizer.step()",
)  # fmt: skip
MICRO_STEP, LIVE_MICRO_STEP, FINISH, PLAN, PLAN_SEQUENCES, ADOPT, MOVE = range(7)
DISPATCH, COMBINE, COMBINE_BACKWARD, DISPATCH_BACKWARD, DISPATCH_WITHOUT_GRADIENTS, COUNTS, RETURNS = range(7, 14)
CLIP, LOGICAL, STEP = range(14, 17)

Call = tuple[int, int, int, int]
"""Index into `CALLS`, layer, micro-step, and how many calls came before the forward that it belongs to; -1 for none."""

# Of sessions, by the name of their control group: ranks may be in sessions that others are not in.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
_HEADER = 3


class Lockstep:
    """The journal of one rank, and its comparison with those of the other ranks that share experts.

    Attributes:
        count: calls so far.

    Args:
        topology: whose `expert_control` and `control` groups the ranks meet in.
        most_votes: integers that `agree` can exchange.
    """

    def __init__(self, topology: Topology, *, most_votes: int) -> None:
        self._topology = topology
        self._names = [f"rank {rank}" for rank in dist.get_process_group_ranks(topology.control)]
        self._timeout_s = topology.timeout.total_seconds()
        self._width = _HEADER + most_votes
        # The digest covers all calls; the last ones are kept to name a difference.
        self._digest, self.count = 0, 0
        self._last: deque[Call] = deque(maxlen=REMEMBERED)
        control = topology.control.group_name
        self._store_key = f"trimtab/lockstep/{control}/{next(_numbers[control])}"
        self._waiter = _Waiter()

    def note(self, kind: int, layer: int = -1, micro_step: int = -1, forward: int = -1) -> int:
        """Add a call to the journal.

        Returns:
            A tag for messages of this call, the same on all ranks that are in lockstep: they match no other call's.
        """
        call = (kind, layer, micro_step, forward)
        self._last.append(call)
        self.count += 1
        self._digest = hash((self._digest, call))
        return self._digest & 0x7FFFFFFF

    def agree(
        self,
        kind: int,
        *,
        layer: int = -1,
        micro_step: int = -1,
        same: Mapping[str, Any] | None = None,
        votes: Sequence[int] | Array = (),
        problem: Exception | None = None,
        everywhere: bool = False,
    ) -> Array:
        """Meet the other ranks in a call, and exchange integers. Collective.

        Args:
            everywhere: meet all data ranks, not only those that share experts.
            same: what should be the same on all ranks, by name; compared by its `repr`.
            votes: integers of this rank.
            problem: what keeps this rank from going on, if anything does. It is then raised on all ranks.

        Returns:
            `[R, V]` int64, the votes of all ranks.

        Raises:
            RanksDisagreeError: if the ranks made different calls, or `same` differs.
            InputError, RuntimeError: as `problem`, on every rank; the message names the rank if it is another one.
        """
        self.note(kind, layer, micro_step)
        row = np.zeros(self._width, np.int64)
        digest = hashlib.blake2b(repr(same).encode(), digest_size=8).digest() if same else bytes(8)
        row[:_HEADER] = self._digest, int.from_bytes(digest, "little", signed=True), problem is not None
        row[_HEADER : _HEADER + len(votes)] = votes
        group = self._topology.control if everywhere else self._topology.expert_control
        rows = [torch.empty(self._width, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
        self.wait(dist.all_gather(rows, torch.from_numpy(row), group=group, async_op=True).wait)
        rows_RW = torch.stack(rows).numpy()
        # Groups of experts may have been through other calls than each other.
        digests = rows_RW[:, 0].reshape(-1, self._topology.num_ranks)
        if rows_RW[:, 2].any() or (rows_RW[:, 1] != row[1]).any() or (digests != digests[:, :1]).any():
            self._raise(group, same or {}, problem)
        return rows_RW[:, _HEADER : _HEADER + len(votes)]

    def wait(self, work: Callable[[], object]) -> None:
        """Wait until `work()` returns, on another thread; meanwhile look now and then whether the ranks still agree.

        Raises:
            RanksDisagreeError: if what this rank waits for can't come, since others made other calls.
            RuntimeError: what `work` raised, or after the timeout.
        """
        try:
            self._wait(work)
        except BaseException:
            # It may still be at this call.
            self._waiter = _Waiter()
            raise

    def _wait(self, work: Callable[[], object]) -> None:
        self._waiter.start(work)
        start = time.monotonic()
        while not self._waiter.is_done(min(PATIENCE_S, self._timeout_s)):
            self._publish()
            _raise_first_difference(self._published())
            if time.monotonic() - start > self._timeout_s:
                raise RanksDisagreeError(self._whereabouts())
        with self.explaining():
            self._waiter.result()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """An exchange within that fails because ranks made different calls raises RanksDisagreeError."""
        try:
            yield
        except RanksDisagreeError:
            raise
        except RuntimeError as error:
            self._publish()
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline and len(self._published()) < self._topology.num_ranks:
                time.sleep(0.05)
            try:
                _raise_first_difference(self._published())
            except RanksDisagreeError as found:
                raise found from error
            if "timed out" in str(error).lower():
                raise RanksDisagreeError(self._whereabouts()) from error
            raise

    def _raise(self, group: dist.ProcessGroup, same: Mapping[str, Any], problem: Exception | None) -> None:
        """Raise what is wrong, the same on all ranks of the group; all of them come here."""
        mine = (self.count, tuple(self._last), {k: repr(v) for k, v in same.items()}, _describe(problem))
        everyones: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyones, mine, group=group)
        ranks = self._topology.num_ranks
        names = self._names if len(everyones) == len(self._names) else self._peers
        for name, (_, _, _, described) in zip(names, everyones, strict=True):
            if described is not None:
                if problem is not None and described == _describe(problem):
                    raise problem
                kind = InputError if described[0] else RuntimeError
                raise kind(f"{name}: {described[1]}")
        for start in range(0, len(everyones), ranks):
            journals = zip(names[start : start + ranks], everyones[start : start + ranks], strict=True)
            _raise_first_difference({name: (count, last) for name, (count, last, _, _) in journals})
        for key in same:
            values = [everyone[2].get(key) for everyone in everyones]
            for name, value in zip(names, values, strict=True):
                if value != values[0]:
                    raise RanksDisagreeError(
                        f"ranks disagree in {_text(self._last[-1])}: {key} is {values[0]} on {names[0]} and "
                        f"{value} on {name}"
                    )
        raise RanksDisagreeError(f"ranks disagree before {_text(self._last[-1])}, more than {REMEMBERED} calls ago")

    @property
    def _peers(self) -> list[str]:
        """Names of the ranks that share experts with this one."""
        first = self._topology.group * self._topology.num_ranks
        return self._names[first : first + self._topology.num_ranks]

    def _publish(self) -> None:
        value = json.dumps((self.count, tuple(self._last)))
        _store().set(f"{self._store_key}/{self._peers[self._topology.rank]}", value)

    def _published(self) -> dict[str, tuple[int, tuple[Call, ...]]]:
        """What ranks have published, by their names. An old entry is the beginning of what a rank would say now."""
        found = {}
        for name in self._peers:
            if _store().check([f"{self._store_key}/{name}"]):
                found[name] = json.loads(_store().get(f"{self._store_key}/{name}"))
        return found

    def _whereabouts(self) -> str:
        published = self._published()
        own = self._peers[self._topology.rank]
        parts = [
            f"{name} waited last in {_text(published[name][1][-1])}"
            if name in published
            else f"{name} waits for nothing that the session knows of"
            for name in self._peers
            if name != own
        ]
        return f"{own} has waited {self._timeout_s:.0f} s in {_text(self._last[-1])}; {'; '.join(parts)}"


def digest(*arrays: Array) -> str:
    """A few letters that differ if arrays do."""
    whole = hashlib.blake2b(digest_size=6)
    for array in arrays:
        whole.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()


def _raise_first_difference(journals: Mapping[str, tuple[int, Sequence[Call]]]) -> None:
    """Raise RanksDisagreeError for the first call that differs, if any does.

    Args:
        journals: by name of the rank, how many calls it made and the last of them. One that is shorter than another
            is not different: that rank may come to it yet.
    """
    starts = {name: count - len(last) for name, (count, last) in journals.items()}
    first = max(starts.values(), default=0)
    ends = max((count for count, _ in journals.values()), default=0)
    for place in range(first, ends):
        ranks_of: dict[Call, list[str]] = {}
        for name, (count, last) in journals.items():
            if place < count:
                ranks_of.setdefault(tuple(last[place - starts[name]]), []).append(name)  # type: ignore[arg-type]
        if len(ranks_of) > 1:
            parts = [f"{_list(names)} called {_text(call)}" for call, names in ranks_of.items()]
            raise RanksDisagreeError(
                "ranks disagree: " + " where ".join(parts) + "; all ranks that share experts must make the same calls "
                "of the session and its layers in the same order"
            )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _text(call: Call) -> str:
    kind, layer, micro_step, forward = call
    where = f"in micro-step {micro_step}" if micro_step >= 0 else "outside a planned micro-step"
    return CALLS[kind].format(step=micro_step, layer=layer, where=where, of=f" (of the forward at call {forward})")


def _describe(problem: Exception | None) -> tuple[bool, str] | None:
    return None if problem is None else (isinstance(problem, InputError), str(problem))


class _Waiter:
    """Runs one blocking call at a time on a thread of its own, so that the caller can give up waiting.

    A timeout of the call itself would close gloo's connections.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        self._done = threading.Semaphore(0)
        # A daemon thread: a call that was given up may never return.
        arguments = (self._calls, self._errors, self._done)
        threading.Thread(target=_run_calls, args=arguments, name="trimtab-waiter", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def start(self, call: Callable[[], object]) -> None:
        self._calls.put(call)

    def is_done(self, timeout_s: float) -> bool:
        return self._done.acquire(timeout=timeout_s)

    def result(self) -> None:
        """Raise what the call raised, once it is done."""
        if self._errors:
            raise self._errors.pop()


def _run_calls(
    calls: queue.SimpleQueue[Callable[[], object] | None], errors: list[BaseException], done: threading.Semaphore
) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except BaseException as error:
            errors.append(error)
        # What it refers to should not live until the next call.
        del call
        done.release()
