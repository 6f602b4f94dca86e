"""Ranks that stay alive between calls of tests: it takes seconds to start one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any
from unittest import mock

import numpy as np

from helpers.examples import examples
from helpers.processor_time import ProcessorLimit
from trimtab.launch.launcher import ALLOCATOR
from trimtab.shared_files import remove_shared_files

# Processor seconds of a rank, of one call and of one test.
LIMIT_S = examples(short=90, long=600)
TEST_LIMIT_S = examples(short=600, long=1800)

# Idle threads of gloo take time too. Megatron's models stay alive, with some 60 threads of their groups.
MAX_THREADS = 100


class RankPool:
    """Processes of one process group, each with a dictionary that its calls share. Those that fail are replaced.

    Args:
        patched: see `shared_pool`.

    Attributes:
        ways: how calls run, see `helpers.accelerator`.
    """

    def __init__(self, ranks: int, patched: str = "") -> None:
        self.ranks, self._patched = ranks, patched
        self.ways = os.environ.get("AS_ON_GPUS", "")
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """Results of `function(state, *args)` on all ranks.

        Raises:
            AssertionError: with the tracebacks of ranks that raised, or did not answer.
        """
        if not self._connections:
            self._start()
        for connection in self._connections:
            connection.send((function, args, self.ways, self._patched))
        ids = [process.pid or 0 for process in self._processes]
        limit = ProcessorLimit(ids, self.ranks * limit_s)
        reason = ""
        values: list[Any] = [None] * self.ranks
        works_R: list[Any] = [None] * self.ranks
        problems: list[str] = []
        waiting = dict(enumerate(self._connections))
        while waiting and not reason:
            ready = wait(waiting.values(), 0.25)
            reason = "" if ready else limit.exceeded(ids)
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                try:
                    values[rank], works_R[rank], problem = waiting.pop(rank).recv()
                except EOFError:
                    self._processes[rank].join(60)
                    problem = f"ended with status {self._processes[rank].exitcode}"
                if problem:
                    problems.append(f"rank {rank}, {function.__name__}{args}: {problem}")
                    # Ranks that wait for a failed rank do not answer.
                    limit = ProcessorLimit(ids, self.ranks * limit_s, idle_s=2.0)
        problems += [f"rank {rank}, {function.__name__}{args}: no answer, {reason}" for rank in waiting]
        if problems:
            self.close()
            raise AssertionError("\n".join(problems))
        if any(works_R):
            from helpers.accelerator import check_queues

            check_queues(works_R)
        return values

    def forget(self) -> None:
        """Empty the dictionaries, and end the ranks if too many threads stay."""
        if self._connections and max(self.call(_forget)) > MAX_THREADS:
            self.close()

    def close(self) -> None:
        """Kill the ranks."""
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            remove_shared_files(process.pid or 0)
            connection.close()
        self._connections, self._processes = [], []

    def _start(self) -> None:
        # Torch is for tests with ranks only.
        from torch._C._distributed_c10d import TCPStore

        context = multiprocessing.get_context("forkserver")
        # Imported once for all ranks that this process ever starts.
        context.set_forkserver_preload(["recipes.rl.train", "megatron.core.models.gpt.gpt_model"])
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with mock.patch.dict(os.environ, ALLOCATOR):
            for rank in range(self.ranks):
                ours, theirs = context.Pipe()
                arguments = rank, self.ranks, self._store.port, theirs
                self._processes.append(context.Process(target=_serve, args=arguments, daemon=True))
                self._connections.append(ours)
                self._processes[-1].start()
                theirs.close()


@cache
def shared_pool(ranks: int, patched: str = "") -> RankPool:
    """The ranks that all tests of this process share. Their functions leave nothing behind that others notice.

    Args:
        ranks: number of ranks.
        patched: what the functions of these ranks patch for good, for example "megatron".
    """
    pool = RankPool(ranks, patched)
    # Also at the end of processes that are forked for a file of tests.
    Finalize(None, pool.close, exitpriority=10)
    return pool


def on_ranks(
    function: Callable[..., Any], args: tuple[Any, ...] = (), *, ranks: int, patched: str = "", ways: str = ""
) -> list[Any]:
    """Results of `function(*args)` on ranks of `shared_pool`; called as `launch`. It runs in `ways`, if there are any.

    Raises:
        AssertionError: with the tracebacks of ranks that raised, or did not answer.
    """
    pool = shared_pool(ranks, patched)
    with mock.patch.object(pool, "ways", ways or pool.ways):
        results = pool.call(_call, function, *args, limit_s=TEST_LIMIT_S)
    pool.forget()
    return results


@cache
def scattered_groups(groups: int, seed: int) -> dict[str, Any]:
    """An expert-parallel group of random ranks in random order, and the matching expert-data-parallel group.

    They are made once for each test.
    """
    import torch.distributed as dist

    ranks_GR = np.random.default_rng(seed).permutation(dist.get_world_size()).reshape(groups, -1)
    experts, same_experts = (
        [dist.new_group(ranks, sort_ranks=False) for ranks in table.tolist()] for table in (ranks_GR, ranks_GR.T)
    )
    group, position = (int(place[0]) for place in np.nonzero(ranks_GR == dist.get_rank()))
    return {"expert_group": experts[group], "expert_dp_group": same_experts[position] if groups > 1 else None}


def _call(_state: dict[str, Any], function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _forget(state: dict[str, Any]) -> int:
    """Returns the number of threads that stay."""
    import torch.distributed as dist

    from trimtab.runtime.ranks import process_groups

    state.clear()
    scattered_groups.cache_clear()
    # Sessions and models are reference cycles.
    gc.collect()
    if "torch.distributed.tensor" in sys.modules:
        # Of equal meshes DTensors would get the groups that are destroyed below.
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()
    # Threads of gloo wake up 100 times a second, as long as their group is there.
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    # Numbers of groups go on, since the store of the ranks knows the names of earlier ones.
    for created in process_groups._created.values():
        created.clear()
    # What lives now, modules mostly, is not searched again.
    gc.freeze()
    return len(os.listdir("/proc/self/task"))


def _serve(rank: int, ranks: int, port: int, connection: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=10))
    state: dict[str, Any] = {}
    while True:
        try:
            function, args, ways, patched = connection.recv()
        except EOFError:
            # The tests have ended.
            remove_shared_files(os.getpid())
            os._exit(0)
        try:
            connection.send((*_run(function, (state, *args), ways, patched), ""))
        except BaseException:
            connection.send((None, None, traceback.format_exc()))


def _run(function: Callable[..., Any], args: tuple[Any, ...], ways: str, patched: str) -> tuple[Any, Any]:
    """The result of a call, and what it issued to a device, if that is recorded."""
    if not ways or function is _forget:
        return function(*args), None
    from helpers.accelerator import as_on_gpus

    with as_on_gpus(ways, patched) as works:
        result = function(*args)
    return result, works
