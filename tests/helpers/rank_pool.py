"""Ranks that stay alive between calls of tests: it takes seconds to start one."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np

from helpers.examples import examples
from trimtab.errors import RankFailedError
from trimtab.launch import launch

# Of one call, and of one test.
TIMEOUT_S = examples(short=90, long=600)
TEST_TIMEOUT_S = examples(short=600, long=1800)


class RankPool:
    """Processes of one process group, each with a dictionary that its calls share. Those that fail are replaced."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Results of `function(state, *args)` on all ranks.

        Raises:
            AssertionError: with the tracebacks of ranks that raised, or did not answer.
        """
        if not self._connections:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        deadline = time.monotonic() + timeout_s
        values: list[Any] = []
        problems: list[str] = []
        for rank, connection in enumerate(self._connections):
            try:
                # Ranks that wait for a failed rank do not answer.
                if connection.poll(2 if problems else max(0.0, deadline - time.monotonic())):
                    value, problem = connection.recv()
                else:
                    value, problem = None, "no answer"
            except EOFError:
                value, problem = None, "ended"
            values.append(value)
            if problem:
                problems.append(f"rank {rank}, {function.__name__}{args}: {problem}")
        if problems:
            self.close()
            raise AssertionError("\n".join(problems))
        return values

    def forget(self) -> None:
        """Empty the dictionaries."""
        if self._connections:
            self.call(_forget)

    def close(self) -> None:
        """Kill the ranks."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for connection in self._connections:
            connection.close()
        self._connections, self._pids = [], []
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        listener = Listener(("127.0.0.1", 0))
        self._thread = threading.Thread(target=_launch, args=(listener.address, self._ranks), daemon=True)
        self._thread.start()
        connections: dict[int, Connection] = {}
        for _ in range(self._ranks):
            connection = listener.accept()
            rank, pid = connection.recv()
            connections[rank] = connection
            self._pids.append(pid)
        self._connections = [connections[rank] for rank in range(self._ranks)]
        listener.close()


@cache
def shared_pool(ranks: int, patched: str = "") -> RankPool:
    """The ranks that all tests of this process share. Their functions leave nothing behind that others notice.

    Args:
        ranks: number of ranks.
        patched: what the functions of these ranks patch for good, for example "megatron".
    """
    pool = RankPool(ranks)
    atexit.register(pool.close)
    return pool


def on_ranks(function: Callable[..., Any], args: tuple[Any, ...] = (), *, ranks: int, patched: str = "") -> list[Any]:
    """Results of `function(*args)` on ranks of `shared_pool`; called as `launch`.

    Raises:
        AssertionError: with the tracebacks of ranks that raised, or did not answer.
    """
    pool = shared_pool(ranks, patched)
    results = pool.call(_call, function, *args, timeout_s=TEST_TIMEOUT_S)
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


def _forget(state: dict[str, Any]) -> None:
    import torch.distributed as dist

    from trimtab.runtime.ranks import topology

    state.clear()
    scattered_groups.cache_clear()
    # Sessions and models are reference cycles.
    gc.collect()
    # Threads of gloo wake up 100 times a second, as long as their group is there.
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    # Numbers of groups go on, since the store of the ranks knows the names of earlier ones.
    for created in topology._created.values():
        created.groups.clear()
    # What lives now, modules mostly, is not searched again.
    gc.freeze()


def _launch(address: Any, ranks: int) -> None:
    with suppress(RankFailedError):  # The normal end of ranks.
        launch(_serve, (address,), ranks=ranks)


def _serve(address: Any) -> None:
    import torch.distributed as dist

    connection = Client(address)
    connection.send((dist.get_rank(), os.getpid()))
    state: dict[str, Any] = {}
    while True:
        function, args = connection.recv()
        try:
            connection.send((function(state, *args), ""))
        except BaseException:
            connection.send((None, traceback.format_exc()))
