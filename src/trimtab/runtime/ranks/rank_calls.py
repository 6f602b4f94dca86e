"""`on_first_rank`: a call on one rank, whose result all ranks get; `CallThread`: blocking calls on a thread."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from trimtab.errors import InputError

T = TypeVar("T")


def on_first_rank(function: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Call a function on the first rank of a group. Returns its result on all ranks. Collective.

    Raises:
        InputError: on all ranks, if the function raises it.
        RuntimeError: on other ranks, if the function raises anything else, with the rank and the error.
    """
    # The result; if the function failed, whether for its input; and the error's text, since other ranks may not be able
    # to load its class.
    message: list[Any] = [None, None, ""]
    if dist.get_rank(group) == 0:
        try:
            message[0] = function()
        except BaseException as error:
            first = dist.get_process_group_ranks(group)[0]
            is_input = isinstance(error, InputError)
            text = str(error) if is_input else f"rank {first} failed: {type(error).__name__}: {error}"
            dist.broadcast_object_list([None, is_input, text], group=group, group_src=0)
            raise
    dist.broadcast_object_list(message, group=group, group_src=0)
    result, is_input_error, text = message
    if is_input_error is not None:
        raise InputError(text) if is_input_error else RuntimeError(text)
    return cast(T, result)


def attempt(function: Callable[..., T], *args: Any) -> tuple[T | None, Exception | None]:
    """The result of a function, or the error that it raises."""
    try:
        return function(*args), None
    except (InputError, RuntimeError) as error:
        return None, error


class CallThread:
    """A thread that runs one blocking call at a time. The caller can stop waiting for it.

    A timeout of waiting is not passed to gloo, because a gloo timeout closes its connections.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str = "trimtab-calls") -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        self._done = threading.Semaphore(0)
        # A daemon thread, since a call may never return.
        arguments = (self._calls, self._errors, self._done)
        threading.Thread(target=_run_calls, args=arguments, name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def start(self, call: Callable[[], object]) -> None:
        """Run a call, after those before."""
        self._calls.put(call)

    def is_done(self, timeout_s: float) -> bool:
        """Wait for the call for at most some seconds; returns whether it is done."""
        return self._done.acquire(timeout=timeout_s)

    def result(self) -> None:
        """Raise the error of the call that is done, if any."""
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
        # Frees the objects that the call refers to.
        del call
        done.release()
