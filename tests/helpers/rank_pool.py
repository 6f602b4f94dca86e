"""Ranks that stay alive between calls of a test."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from trimtab.errors import RankFailedError
from trimtab.launch import launch

TIMEOUT_S = 90


class RankPool:
    """Processes of one process group, each with a dictionary that its calls share. Those that fail are replaced."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._connections: list[Connection] = []
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results of `function(state, *args)` on all ranks.

        Raises:
            AssertionError: with the tracebacks of ranks that raised, or did not answer.
        """
        if not self._connections:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        deadline = time.monotonic() + TIMEOUT_S
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

    def close(self) -> None:
        """Kill the ranks."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        listener = Listener(("127.0.0.1", 0))
        self._thread = threading.Thread(target=_launch, args=(listener.address, self._ranks), daemon=True)
        self._thread.start()
        connections: dict[int, Connection] = {}
        for _ in range(self._ranks):
            connection = listener.accept()
            connections[connection.recv()] = connection
        self._connections = [connections[rank] for rank in range(self._ranks)]
        listener.close()


def _launch(address: Any, ranks: int) -> None:
    with suppress(RankFailedError):  # The normal end of ranks.
        launch(_serve, (address,), ranks=ranks)


def _serve(address: Any) -> None:
    import torch.distributed as dist

    connection = Client(address)
    connection.send(dist.get_rank())
    state: dict[str, Any] = {}
    while True:
        # This rank ends with the connection, and the launcher then kills ranks that hang.
        function, args = connection.recv()
        try:
            connection.send((function(state, *args), ""))
        except BaseException:
            connection.send((None, traceback.format_exc()))
