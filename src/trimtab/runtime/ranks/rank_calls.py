"""Calls whose results or errors ranks share, and blocking calls on a thread.

* `on_first_rank`: a call on one rank, whose result all ranks get.
* `Leaders`: exchanges between the first ranks of all expert-parallel groups, each of which plans for its group.
* `CallThread`: blocking calls that the caller can stop waiting for.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch.distributed as dist

from trimtab.errors import InputError

T = TypeVar("T")


def _for_others(error: BaseException) -> InputError | RuntimeError:
    """The error of this rank as other ranks raise it. They may not be able to load its class."""
    if isinstance(error, InputError):
        return InputError(str(error))
    return RuntimeError(f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}")


def on_first_rank(function: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Call a function on the first rank of a group. Returns its result on all ranks. Collective.

    Raises:
        InputError: on all ranks, if the function raises it.
        RuntimeError: on other ranks, if the function raises anything else, with the rank and the error.
    """
    message: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            message[0] = function()
        except BaseException as error:
            dist.broadcast_object_list([_for_others(error)], group=group, group_src=0)
            raise
    dist.broadcast_object_list(message, group=group, group_src=0)
    if isinstance(message[0], Exception):
        raise message[0]
    return cast(T, message[0])


def attempt(function: Callable[..., T], *args: Any) -> tuple[T | None, Exception | None]:
    """The result of a function, or the error that it raises of what a user gives or a system has."""
    try:
        return function(*args), None
    except (InputError, RuntimeError, OSError) as error:
        return None, error


class CallThread:
    """A thread that runs one blocking call at a time. The caller can stop waiting for it.

    A timeout of waiting is not passed to gloo, because a gloo timeout closes its connections.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str = "trimtab-calls") -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # The error of each call that is done; None without one. Locks of `threading` cost a dozen calls for each use.
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        # A daemon thread, since a call may never return.
        arguments = (self._calls, self._done)
        threading.Thread(target=_run_calls, args=arguments, name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def start(self, call: Callable[[], object]) -> None:
        """Run a call, after those before."""
        self._calls.put(call)

    def is_done(self, timeout_s: float) -> bool:
        """Wait for the call for at most some seconds; returns whether it is done."""
        try:
            self._error = self._done.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True

    def result(self) -> None:
        """Raise the error of the call that is done, if any."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def _run_calls(
    calls: queue.SimpleQueue[Callable[[], object] | None], done: queue.SimpleQueue[BaseException | None]
) -> None:
    while (call := calls.get()) is not None:
        failed = None
        try:
            call()
        except BaseException as error:
            failed = error
        # Frees the objects that the call refers to.
        del call
        done.put(failed)
        del failed


class Leaders:
    """Exchanges of one plan between the first ranks of all expert-parallel groups, each of which plans for its group.

    So neither memory nor time of planning grows with the number of groups. A rank that fails tells the others in place
    of its next value, so that none waits for it.

    Args:
        group: the first ranks of all expert-parallel groups, in their order; None for one expert-parallel group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._told: BaseException | None = None

    def run(self, plan: Callable[[], T]) -> T:
        """Call a function that uses `gather` and `spread`. Collective; it raises on all ranks if it fails on any.

        Raises:
            InputError, RuntimeError: as on the first rank that failed; a rank's own error on that rank.
        """
        try:
            result = plan()
            self.gather([])
            return result
        except BaseException as error:
            if self._group is not None and error is not self._told:
                with suppress(Exception):
                    self._exchange(_for_others(error))
            raise

    def gather(self, values: Sequence[T]) -> list[T]:
        """The values of all ranks, one after another. Collective."""
        if self._group is None:
            return list(values)
        return [value for part in self._exchange(list(values)) for value in part]

    def spread(self, make: Callable[[], Sequence[T]]) -> T:
        """Of the values that the first of the ranks makes, this rank's. Collective."""
        if self._group is None:
            return make()[0]
        values = list(make()) if dist.get_rank(self._group) == 0 else None
        # The others get to know of an error.
        self.gather([])
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values, group=self._group, group_src=0)
        return mine[0]  # type: ignore[no-any-return]

    def _exchange(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, mine, group=self._group)
        for value in found:
            if isinstance(value, Exception):
                self._told = value
                raise value
        return found
