"""`Lockstep`: checks that all ranks make the same calls in the same order; an error names the ranks and their calls.

Each rank keeps a log of its calls of the session and of every exchange of every layer. The ranks compare digests of
their logs when a micro-step begins, when gradients are finished and when a step is planned. A rank that waits longer
than `COMPARE_AFTER_S` publishes the end of its log in the store of the process group, and compares it with the logs
that other ranks published there. This detects ranks that block each other in different calls.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
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
from trimtab.runtime.ranks.rank_calls import CallThread
from trimtab.runtime.ranks.topology import Topology

# The second is its name before torch 2.13, which warns of it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Seconds of waiting after which a rank compares logs, and between further comparisons.
COMPARE_AFTER_S = 5.0
# Seconds of waiting after which it warns. The first use of kernels compiles for up to 40 s, while other ranks wait.
TELL_AFTER_S = 60.0
# Seconds that a rank whose exchange failed waits for the others to publish their logs.
PUBLISHING_S = 2.0
# Calls of the log that are kept to name a difference.
KEPT_CALLS = 512

CALLS = (
    "micro_step({step})", "live_micro_step()", "finish_gradients()", "plan()", "plan_sequences()", "apply_plan()",
    "dispatch of MoE layer {layer} {where}", "combine of MoE layer {layer} {where}",
    "combine of MoE layer {layer} {where}, backward{of}", "dispatch of MoE layer {layer} {where}, backward{of}",
    "dispatch of MoE layer {layer} {where} without gradients", "counts of MoE layer {layer}",
    "gradients of replicas of MoE layer {layer} {where}{of}", "clip_gradients()", "whole_state_dict()",
    "optimizer.step()",
    "second dispatch of MoE layer {layer} {where}", "second combine of MoE layer {layer} {where}",
    "second dispatch of MoE layer {layer} {where}, backward{of}",
    "second combine of MoE layer {layer} {where}, backward{of}",
    "suspend()", "sync_placement()", "renumber()",
)  # fmt: skip
MICRO_STEP, LIVE_MICRO_STEP, FINISH, PLAN, PLAN_SEQUENCES, APPLY_PLAN = range(6)
DISPATCH, COMBINE, COMBINE_BACKWARD, DISPATCH_BACKWARD, DISPATCH_WITHOUT_GRADIENTS, COUNTS, RETURNS = range(6, 13)
CLIP, WHOLE, STEP = range(13, 16)
SECOND_DISPATCH, SECOND_COMBINE = range(16, 18)
# From these to the same in backward.
SECOND_BACKWARD = 2
SUSPEND, SYNC_PLACEMENT, RENUMBER = range(20, 23)

Call = tuple[int, int, int, int]
"""Index into `CALLS`, layer, micro-step, and length of the log at the forward that it belongs to; -1 for none."""

# Numbers of sessions by their control group: a rank may be in sessions that other ranks are not in.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
# Integers before the values in an exchange of `agree`: digests of log and `must_match`, and whether there is a problem.
_HEADER = 3


class Lockstep:
    """The log of one rank, and its comparison with those of the other ranks of the expert-parallel group.

    Args:
        topology: process groups; comparisons use `expert_control` and `control`.
        num_experts, slots_per_rank: experts of a layer, and slots of a rank; compared before the first exchange.
        max_values: maximum number of integers that `agree` can exchange, the same on all ranks with as many experts and
            slots.

    Attributes:
        count: number of calls so far.
        resume: creates process groups again; called by the first comparison after `suspend`.
    """

    def __init__(self, topology: Topology, *, num_experts: int, slots_per_rank: int, max_values: int) -> None:
        self._topology = topology
        self._sizes = {"num_experts": num_experts, "slots_per_rank": slots_per_rank}
        self._width, self._is_width_compared = _HEADER + max_values, False
        self._digest, self.count = 0, 0
        self._agreed: Call | None = None
        self._last: deque[Call] = deque(maxlen=KEPT_CALLS)
        self._thread: CallThread | None = None
        self.resume: Callable[[], None] = lambda: None
        self._start()

    def _start(self) -> None:
        """Start to use the process groups, which are new."""
        control = self._topology.control
        self._names = [f"rank {rank}" for rank in dist.get_process_group_ranks(control)]
        self._timeout_s = self._topology.timeout.total_seconds()
        self._store_key = f"trimtab/lockstep/{control.group_name}/{next(_numbers[control.group_name])}"
        self._thread = CallThread()

    def suspend(self) -> None:
        """End the thread. The next call that all ranks make goes on with the process groups that `resume` creates."""
        self._thread = None

    def need_groups(self) -> None:
        """Create process groups again after `suspend`. Collective over all data ranks then."""
        if self._thread is None:
            self.resume()
            self._start()

    def log(self, kind: int, layer: int = -1, micro_step: int = -1, forward: int = -1) -> int:
        """Add a call to the log.

        Returns:
            A message tag, equal on all ranks with equal logs. Messages of other calls have other tags.
        """
        call = (kind, layer, micro_step, forward)
        self._last.append(call)
        self.count += 1
        self._digest = hash((self._digest, call))
        return message_tag(self._digest)

    def agree(
        self,
        kind: int,
        *,
        layer: int = -1,
        micro_step: int = -1,
        must_match: Mapping[str, Any] | None = None,
        values: Sequence[int] | Array = (),
        problem: Exception | None = None,
        all_data_ranks: bool = False,
        names: Mapping[str, str] | None = None,
    ) -> Array:
        """Log a call, compare it with the other ranks' calls, and exchange integers. Collective.

        Args:
            kind, layer, micro_step: the call; see `Call`.
            must_match: values that must be equal on all compared ranks, by name; compared by their `repr`.
            values: integers of this rank.
            problem: an error of this rank, which is raised on all ranks.
            all_data_ranks: compare all data ranks, not only the ranks of the expert-parallel group.
            names: added to names of `must_match` in errors; they may differ between ranks.

        Returns:
            `[ranks, V]` int64, `values` of every compared rank: those of the expert-parallel group, or all data ranks.

        Raises:
            RanksDisagreeError: if the ranks made different calls, or `must_match` differs.
            InputError, RuntimeError: as `problem`, on every rank; the message names the rank if it is another one.
        """
        self.need_groups()
        self.log(kind, layer, micro_step)
        row = np.zeros(self._width, np.int64)
        digest = hashlib.blake2b(repr(must_match).encode(), digest_size=8).digest() if must_match else bytes(8)
        row[:_HEADER] = self._digest, int.from_bytes(digest, "little", signed=True), problem is not None
        row[_HEADER : _HEADER + len(values)] = values
        group = self._topology.control if all_data_ranks else self._topology.expert_control
        self._compare_width(group)
        rows_RW = self._gather(row, group)
        # Logs of different expert-parallel groups may differ.
        digests = rows_RW[:, 0].reshape(-1, self._topology.num_ranks)
        if (rows_RW[:, 1:_HEADER] != (row[1], 0)).any() or (digests != digests[:, :1]).any():
            self._raise_difference(group, must_match or {}, problem, names or {})
        self._agreed = self._last[-1]
        return rows_RW[:, _HEADER : _HEADER + len(values)]

    def _compare_width(self, group: dist.ProcessGroup) -> None:
        """Check once that rows are equally long on all ranks. Gloo aborts the process of a longer one."""
        if self._is_width_compared:
            return
        sizes_RV = self._gather(np.array(list(self._sizes.values())), group)
        names = self._names if len(sizes_RV) == len(self._names) else self._peers
        for size, values_R in zip(self._sizes, sizes_RV.T.tolist(), strict=True):
            for name, value in zip(names, values_R, strict=True):
                if value != values_R[0]:
                    raise RanksDisagreeError(
                        f"ranks disagree: {size} is {values_R[0]} on {names[0]} and {value} on {name}"
                    )
        self._is_width_compared = True

    def _gather(self, row: Array, group: dist.ProcessGroup) -> Array:
        """The rows of all ranks of a group, `[ranks, ...]`."""
        mine = torch.from_numpy(row)
        rows = mine.new_empty(dist.get_world_size(group) * len(mine))
        self.wait(_all_gather(rows, mine, group=group, async_op=True).wait)
        gathered: Array = rows.numpy().reshape(-1, len(row))
        return gathered

    def wait(self, work: Callable[[], object]) -> None:
        """Run `work()` on another thread and wait for it; compare logs while it takes long.

        Raises:
            RanksDisagreeError: if other ranks made other calls, or after the timeout.
            RuntimeError: raised by `work`.
        """
        assert self._thread is not None
        try:
            self._thread.start(work)
            start, is_told = time.monotonic(), False
            while not self._thread.is_done(min(COMPARE_AFTER_S, self._timeout_s)):
                with self._naming_lost_ranks():
                    self._publish()
                    _raise_first_difference(self._published())
                    waited_s = time.monotonic() - start
                    if waited_s > self._timeout_s:
                        raise RanksDisagreeError(self._timeout_text())
                    if waited_s > TELL_AFTER_S and not is_told:
                        logging.getLogger("trimtab").warning("%s", self._waiting_text())
                        is_told = True
            try:
                self._thread.result()
            except RuntimeError:
                with self.comparing_on_error():
                    raise
        except BaseException:
            # The thread may still run this call.
            self._thread = CallThread()
            raise

    @contextmanager
    def comparing_on_error(self) -> Iterator[None]:
        """A context in which a failed exchange raises RanksDisagreeError if ranks made different calls."""
        try:
            yield
        except RanksDisagreeError:
            raise
        except RuntimeError as error:
            with self._naming_lost_ranks():
                self._publish()
                deadline = time.monotonic() + PUBLISHING_S
                while time.monotonic() < deadline and len(self._published()) < self._topology.num_ranks:
                    time.sleep(0.05)
                try:
                    _raise_first_difference(self._published())
                except RanksDisagreeError as difference:
                    raise difference from error
                if "timed out" in str(error).lower():
                    raise RanksDisagreeError(self._timeout_text()) from error
            raise

    @contextmanager
    def _naming_lost_ranks(self) -> Iterator[None]:
        """A context in which an error of the store, which a rank holds that has ended, raises RanksDisagreeError."""
        try:
            yield
        except dist.DistError as error:
            raise RanksDisagreeError(
                f"{self._own_name} waited in {_text(self._last[-1])}, and the rank that holds the store of the process "
                f"group has ended; {self._last_seen}. All ranks must make the same calls, and end after the last one"
            ) from error

    def _raise_difference(
        self,
        group: dist.ProcessGroup,
        must_match: Mapping[str, Any],
        problem: Exception | None,
        known_as: Mapping[str, str],
    ) -> None:
        """Raise a problem or the first difference, the same on all ranks of the group. Collective over the group."""
        mine = (self.count, tuple(self._last), {k: repr(v) for k, v in must_match.items()}, _describe(problem))
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, mine, group=group)
        ranks = self._topology.num_ranks
        names = self._names if len(gathered) == len(self._names) else self._peers
        for name, (_, _, _, described) in zip(names, gathered, strict=True):
            if described is not None:
                if problem is not None and described == _describe(problem):
                    raise problem
                kind = InputError if described[0] else RuntimeError
                raise kind(f"{name}: {described[1]}")
        for start in range(0, len(gathered), ranks):
            logs = zip(names[start : start + ranks], gathered[start : start + ranks], strict=True)
            _raise_first_difference({name: (count, last) for name, (count, last, _, _) in logs})
        for key in must_match:
            values = [other[2].get(key) for other in gathered]
            for name, value in zip(names, values, strict=True):
                if value != values[0]:
                    raise RanksDisagreeError(
                        f"ranks disagree in {_text(self._last[-1])}: {' '.join([key, known_as.get(key, '')]).strip()} "
                        f"is {values[0]} on {names[0]} and {value} on {name}"
                    )
        raise RanksDisagreeError(f"ranks disagree before {_text(self._last[-1])}, more than {KEPT_CALLS} calls ago")

    @property
    def _peers(self) -> list[str]:
        """Names of the ranks of this rank's expert-parallel group."""
        first = self._topology.group * self._topology.num_ranks
        return self._names[first : first + self._topology.num_ranks]

    @property
    def _own_name(self) -> str:
        return self._peers[self._topology.rank]

    @property
    def _last_seen(self) -> str:
        """The last call in which all ranks of the expert-parallel group were."""
        return "no call was common to all" if self._agreed is None else f"all were last seen in {_text(self._agreed)}"

    def _publish(self) -> None:
        value = json.dumps((self.count, tuple(self._last)))
        _store().set(f"{self._store_key}/{self._own_name}", value)

    def _published(self) -> dict[str, tuple[int, tuple[Call, ...]]]:
        """Published logs by rank name: total number of calls and the last `KEPT_CALLS` of them.

        A published log may be a shorter, older version of the rank's log.
        """
        logs = {}
        for name in self._peers:
            if _store().check([f"{self._store_key}/{name}"]):
                logs[name] = json.loads(_store().get(f"{self._store_key}/{name}"))
        return logs

    def _waiting_text(self) -> str:
        """Which ranks this one waits for: those whose log does not have its call yet, as far as they have told."""
        published = self._published()
        behind = [name for name in self._peers if name not in published or published[name][0] < self.count]
        others = [name for name in behind if name != self._own_name] or [n for n in self._peers if n != self._own_name]
        return f"{self._own_name} waits in {_text(self._last[-1])} for {_list(others)}; {self._last_seen}"

    def _timeout_text(self) -> str:
        published, own = self._published(), self._own_name
        parts = [
            f"{name} waited last in {_text(published[name][1][-1])}"
            if name in published
            else f"{name} has published no log: it is not in a Trimtab call, or has not waited long in one"
            for name in self._peers
            if name != own
        ]
        return f"{own} has waited {self._timeout_s:.0f} s in {_text(self._last[-1])}; {'; '.join(parts)}"


def message_tag(key: int | tuple[int, ...]) -> int:
    """A tag for messages, 0 .. 2^31 - 1. Different keys have different tags, except for rare collisions."""
    return hash(key) & 0x7FFFFFFF


def digest(*arrays: Array) -> str:
    """A digest of arrays in hexadecimal digits."""
    whole = hashlib.blake2b(digest_size=6)
    for array in arrays:
        whole.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()


def _raise_first_difference(logs: Mapping[str, tuple[int, Sequence[Call]]]) -> None:
    """Raise RanksDisagreeError for the first call that differs, if any does.

    Args:
        logs: by name of the rank, the number of its calls and the last of them. A log that ends earlier than another
            is not a difference: the rank may make the call later.
    """
    starts = {name: count - len(last) for name, (count, last) in logs.items()}
    first = max(starts.values(), default=0)
    ends = max((count for count, _ in logs.values()), default=0)
    for place in range(first, ends):
        ranks_of: dict[Call, list[str]] = {}
        for name, (count, last) in logs.items():
            if place < count:
                ranks_of.setdefault(tuple(last[place - starts[name]]), []).append(name)  # type: ignore[arg-type]
        if len(ranks_of) > 1:
            parts = [f"{_list(names)} called {_text(call)}" for call, names in ranks_of.items()]
            raise RanksDisagreeError(
                "ranks disagree: " + " where ".join(parts) + "; all ranks of the expert-parallel group must make the "
                "same calls of the session and its layers in the same order"
            )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _text(call: Call) -> str:
    kind, layer, micro_step, forward = call
    where = f"in micro-step {micro_step}" if micro_step >= 0 else "outside a planned micro-step"
    return CALLS[kind].format(step=micro_step, layer=layer, where=where, of=f" (of the forward at call {forward})")


def _describe(problem: Exception | None) -> tuple[bool, str] | None:
    return None if problem is None else (isinstance(problem, InputError), str(problem))
