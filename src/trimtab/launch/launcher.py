"""`launch`: runs a function on local ranks, or as one rank of a job started elsewhere; errors name the failed rank."""

from __future__ import annotations

import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from trimtab.cores import usable_cores
from trimtab.errors import InputError, RankFailedError
from trimtab.interrupts import interrupts_later, take_interrupts
from trimtab.messages import show_messages
from trimtab.rank_variables import can_share_gpus, rank_variable, torchrun_ranks
from trimtab.shared_files import remove_shared_files

PR_SET_PDEATHSIG = 1


def is_suspended(pid: int) -> bool:
    """Whether a process is suspended. False if there is no such process, or no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name before the state may contain anything.
    return stat.rpartition(")")[2].split()[0] == "T"


def continue_with_launcher() -> None:
    """Continue this process when its parent ends, so that it can end too. Linux only; elsewhere it does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


class Suspensions:
    """Seconds for which ranks have been suspended while their launcher ran. Ctrl-Z suspends it too.

    Args:
        timeout: maximum for a rank.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
        self._seconds: dict[int, float] = {}

    def add(self, pids: Mapping[int, int], seconds: float) -> None:
        """Look at all ranks, `seconds` after the last look.

        Args:
            pids: process ids of the ranks that run.

        Raises:
            RankFailedError: naming a rank that has been suspended for the timeout.
        """
        self._seconds = {
            rank: self._seconds.get(rank, 0.0) + seconds for rank, pid in pids.items() if is_suspended(pid)
        }
        for rank, suspended_s in self._seconds.items():
            if suspended_s >= self._timeout_s:
                name = f"rank {rank} (process {pids[rank]})"
                raise RankFailedError(f"{name} has been suspended for {suspended_s:.0f} s; the run was stopped")


log = logging.getLogger("trimtab")
# Timeout of the default process group, and of a rank that is suspended.
TIMEOUT = timedelta(minutes=10)
# Seconds between looks at the state of the ranks; one that ends is noticed at once.
POLL_S = 1.0
# Seconds to wait after the first failure, so that ranks that lost a peer also fail; then the cause is determined.
GRACE_S = 3.0
# Let glibc keep and reuse the memory of freed tensors, in huge pages: page faults can cost more than the arithmetic.
ALLOCATOR = {
    "GLIBC_TUNABLES": ":".join(
        ("glibc.malloc.hugetlb=1", "glibc.malloc.mmap_threshold=33554432", "glibc.malloc.trim_threshold=2147483647")
    )
}
# NCCL orders the kernels of its communicators as the host starts them, from version 2.26 on. Ranks could otherwise run
# those of several communicators in different orders, and wait for each other.
LAUNCH_ORDER = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
# Warnings of torch's C++ show 50 frames of its stack in each rank whose launcher is killed.
CPP_WARNINGS = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Failure:
    """Why a rank's function raised.

    Attributes:
        message: the exception, in one line.
        traceback: the traceback; empty if the rank has printed it.
        is_input: whether the exception is an InputError.
        time: of the exception, in seconds; only comparable with those of the other ranks of the run.
    """

    message: str
    traceback: str
    is_input: bool
    time: float


def launch(worker: Callable[..., None], args: tuple[Any, ...], *, ranks: int) -> None:
    """Call `worker(*args)` on every rank, with the default process group ready: gloo on CPU, NCCL on CUDA.

    Under torchrun this process is one of the ranks and `ranks` is ignored; if the worker raises,
    the process writes the reason to torchrun's error file and ends at once. Otherwise `ranks` processes are started
    here; if one fails or is killed, the others are stopped. Ranks that share a GPU use gloo only, unless NCCL allows it
    (`can_share_gpus`).

    Raises:
        InputError: as a rank raised it, or if torchrun's variables are not as it sets them.
        RankFailedError: naming the rank that failed first and why.
    """
    all_ranks = torchrun_ranks()
    if all_ranks:
        try:
            _join_group(rank_variable("RANK"), all_ranks, rank_variable("LOCAL_RANK"), None)
            worker(*args)
        except Exception as error:
            _exit_with_error(error)
        _destroy_groups()
        return
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    launcher = os.getpid()
    pipes = [context.Pipe() for _ in range(ranks)]
    processes: list[BaseProcess] = [
        context.Process(
            target=_run_rank, args=(launcher, rank, ranks, store.port, pipe, worker, args, log.level), daemon=True
        )
        for rank, (_, pipe) in enumerate(pipes)
    ]
    try:
        with _environment(ALLOCATOR | LAUNCH_ORDER | CPP_WARNINGS), interrupts_later():
            for process in processes:
                process.start()
        for _, child_end in pipes:
            child_end.close()
        _watch(processes, [parent_end for parent_end, _ in pipes])
    finally:
        _stop(processes)


@contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set yet, for processes that are started in this context."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _watch(processes: list[BaseProcess], pipes: list[Connection]) -> None:
    """Return when all ranks have ended; raise if one has failed or is suspended for too long."""
    running = dict(enumerate(processes))
    suspensions = Suspensions(TIMEOUT)
    while running:
        wait([process.sentinel for process in running.values()], POLL_S)
        suspensions.add({rank: process.pid or 0 for rank, process in running.items()}, POLL_S)
        running = {rank: process for rank, process in running.items() if process.is_alive()}
        if any(process.exitcode for rank, process in enumerate(processes) if rank not in running):
            break
    else:
        return
    deadline = time.monotonic() + GRACE_S
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    failures = {rank: failure for rank, pipe in enumerate(pipes) if (failure := _report(pipe)) is not None}
    exits = {rank: (process.pid or 0, process.exitcode) for rank, process in enumerate(processes)}
    raise_cause(exits, failures)


def raise_cause(exits: dict[int, tuple[int, int | None]], failures: dict[int, Failure]) -> NoReturn:
    """Raise the error that ended a run.

    Args:
        exits: process id and exit status by rank; the status is minus the signal for a killed rank, and None for a
            rank that still runs. Of several ranks that ended without a report, the first in this order is named.
        failures: reports by rank.

    Raises:
        InputError: if a rank reported one.
        RankFailedError: if a rank ended without a report (killed or exited), it is named. Otherwise the rank that
            raised first is named, since later ones may only have lost their peer; and the suspended ranks, since
            it may have waited for them.
    """
    inputs = [failure for failure in failures.values() if failure.is_input]
    if inputs:
        raise InputError(inputs[0].message)
    for rank, (pid, status) in exits.items():
        if rank not in failures and status:
            ending = (
                f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
            )
            raise RankFailedError(f"rank {rank} (process {pid}) {ending}; the run was stopped")
    rank, failure = min(failures.items(), key=lambda item: item[1].time)
    sys.stderr.write(failure.traceback)
    waiting = "".join(
        f"; rank {rank} (process {pid}) is suspended"
        for rank, (pid, status) in exits.items()
        if status is None and is_suspended(pid)
    )
    raise RankFailedError(f"rank {rank} failed: {failure.message}{waiting}; the run was stopped")


def _report(pipe: Connection) -> Failure | None:
    """The report that a rank sent before it ended, if any."""
    try:
        return pipe.recv() if pipe.poll() else None
    except (EOFError, OSError):
        return None


def _stop(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join()
            remove_shared_files(process.pid)


def _run_rank(
    launcher: int,
    rank: int,
    ranks: int,
    port: int,
    pipe: Connection,
    worker: Callable[..., None],
    args: tuple[Any, ...],
    log_level: int,
) -> None:
    if log_level:
        # Notes of the first rank stand for all.
        show_messages(log_level if rank == 0 else max(log_level, logging.WARNING))
    # The launcher ends this rank.
    take_interrupts(signal.SIG_IGN)
    continue_with_launcher()
    threading.Thread(target=exit_with_parent, args=(launcher,), daemon=True).start()
    try:
        _join_group(rank, ranks, rank, TCPStore("127.0.0.1", port, is_master=False))
        worker(*args)
        _destroy_groups()
    except BaseException as error:
        is_input = isinstance(error, InputError)
        trace = traceback.format_exc()
        message = str(error) if is_input else trace.strip().splitlines()[-1]
        # The launcher may have ended.
        with suppress(BrokenPipeError):
            pipe.send(Failure(message, trace, is_input, time.monotonic()))
        # A normal interpreter exit would block on peers that wait for this rank.
        _exit_now(1)
    _exit_now(0)


def _destroy_groups() -> None:
    """Destroy all process groups and their threads before the interpreter exits."""
    # Sessions and their layers are reference cycles that keep groups alive until they are collected.
    gc.collect()
    dist.destroy_process_group()


def _exit_with_error(error: Exception) -> NoReturn:
    """End this rank of a job that was started elsewhere, with the reason in `TORCHELASTIC_ERROR_FILE`."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
    # In place of the time of a clock that may be set while the run goes on.
    with suppress(KeyError, OSError):
        os.utime(os.environ["TORCHELASTIC_ERROR_FILE"], ns=(time.monotonic_ns(),) * 2)
    if not isinstance(error, InputError):
        traceback.print_exception(error)
    elif "TORCHELASTIC_ERROR_FILE" not in os.environ:
        print(error, file=sys.stderr)
    _exit_now(1)


def exit_with_parent(parent: int) -> None:
    """Wait until the parent of this process ends, then end this process. To be called on a thread."""
    # If the parent has already ended, `getppid()` differs at once.
    while os.getppid() == parent:
        time.sleep(1.0)
    _exit_now(1)


def _exit_now(status: int) -> NoReturn:
    """End this rank at once, without waiting for its threads."""
    remove_shared_files(os.getpid())
    for stream in (sys.stdout, sys.stderr):
        # The reader of the pipe may have ended.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _join_group(rank: int, ranks: int, local_rank: int, store: Store | None) -> None:
    """Create the default process group; without a store, from the environment variables of torchrun."""
    local_ranks = rank_variable("LOCAL_WORLD_SIZE", ranks)
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        has_own = local_ranks <= torch.cuda.device_count() or can_share_gpus()
        backend = "cpu:gloo,cuda:nccl" if has_own else "gloo"
    else:
        backend = "gloo"
        torch.set_num_threads(max(1, usable_cores() // local_ranks))
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
