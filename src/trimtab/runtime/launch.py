"""Run a function on several local ranks, or as one rank of a torchrun job, and name the rank that failed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from trimtab.errors import InputError, RankFailedError

TIMEOUT = timedelta(minutes=10)
GRACE_S = 3.0
# Let glibc keep and reuse the memory of freed tensors, in huge pages: page faults can cost more than the arithmetic.
ALLOCATOR = {
    "GLIBC_TUNABLES": ":".join(
        ("glibc.malloc.hugetlb=1", "glibc.malloc.mmap_threshold=33554432", "glibc.malloc.trim_threshold=2147483647")
    )
}


@dataclass(frozen=True)
class _Failure:
    """Why a rank's function raised: `input` for a user's mistake, and when, to tell cause from consequence."""

    text: str
    is_input: bool
    time: float


def torchrun_ranks() -> int | None:
    """How many ranks there are, if torchrun (or anything that sets its variables) started this process as one."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def launch(worker: Callable[..., None], args: tuple[Any, ...], *, ranks: int) -> None:
    """Call `worker(*args)` on every rank, with the default process group ready: gloo on CPU, NCCL on CUDA.

    Ranks that have to share a GPU have gloo alone.

    Under torchrun this process is one of the ranks and `ranks` is ignored. Otherwise `ranks` processes are started
    here; if one fails or dies, the others are stopped at once.

    Raises:
        InputError: as a rank raised it.
        RankFailedError: naming the rank that failed first and why.
    """
    if torchrun_ranks():
        _join_group(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]), None)
        try:
            worker(*args)
        finally:
            dist.destroy_process_group()
        return
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(ranks)]
    processes: list[BaseProcess] = [
        context.Process(target=_run_rank, args=(rank, ranks, store.port, pipes[rank][1], worker, args), daemon=True)
        for rank in range(ranks)
    ]
    try:
        with _environment(ALLOCATOR):
            for process in processes:
                process.start()
        for _, child_end in pipes:
            child_end.close()
        _watch(processes, [parent_end for parent_end, _ in pipes])
    finally:
        _stop(processes)


@contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    """Environment variables for processes started meanwhile, where they are not set already."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _watch(processes: list[BaseProcess], pipes: list[Connection]) -> None:
    """Return when all ranks are done; raise when one has failed."""
    running = dict(enumerate(processes))
    while running:
        wait([process.sentinel for process in running.values()])
        running = {rank: process for rank, process in running.items() if process.is_alive()}
        if any(process.exitcode for rank, process in enumerate(processes) if rank not in running):
            break
    else:
        return
    # Ranks that only lost their peer fail right after it. Give them the time to, then look for the cause.
    deadline = time.monotonic() + GRACE_S
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    reports = {rank: _report(pipe) for rank, pipe in enumerate(pipes)}
    failures = {rank: report for rank, report in reports.items() if report is not None}
    inputs = [failure for failure in failures.values() if failure.is_input]
    if inputs:
        raise InputError(inputs[0].text)
    for rank, process in enumerate(processes):
        if rank not in failures and process.exitcode:
            cause = (
                f"was killed by {signal.Signals(-process.exitcode).name}"
                if process.exitcode < 0
                else f"ended with exit status {process.exitcode}"
            )
            raise RankFailedError(f"rank {rank} (process {process.pid}) {cause}; the run was stopped")
    rank, failure = min(failures.items(), key=lambda item: item[1].time)
    sys.stderr.write(failure.text)
    raise RankFailedError(f"rank {rank} failed: {failure.text.strip().splitlines()[-1]}; the run was stopped")


def _report(pipe: Connection) -> _Failure | None:
    """What a rank said before it ended, if anything."""
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


def _run_rank(
    rank: int, ranks: int, port: int, pipe: Connection, worker: Callable[..., None], args: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        _join_group(rank, ranks, rank, TCPStore("127.0.0.1", port, is_master=False))
        worker(*args)
        dist.destroy_process_group()
    except BaseException as error:
        is_input = isinstance(error, InputError)
        text = str(error) if is_input else traceback.format_exc()
        pipe.send(_Failure(text, is_input, time.time()))
        # Leaving through the interpreter would wait for peers that wait for this rank.
        os._exit(1)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _join_group(rank: int, ranks: int, local_rank: int, store: Store | None) -> None:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl" if local_ranks <= torch.cuda.device_count() else "gloo"
    else:
        backend = "gloo"
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))
    if store is None:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
