"""Ranks that stay alive between calls, so that a test can decide call by call what they do next."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from trimtab.errors import RankFailedError
from trimtab.runtime.launch import launch

TIMEOUT_S = 90


class RankPool:
    """Processes of one process group, each with a dictionary that its calls share."""

    def __init__(self, ranks: int) -> None:
        self._listener = Listener(("127.0.0.1", 0))
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._launch, args=(ranks,), daemon=True)
        self._thread.start()
        connections: dict[int, Connection] = {}
        for _ in range(ranks):
            connection = self._listener.accept()
            connections[connection.recv()] = connection
        self._connections = [connections[rank] for rank in range(ranks)]

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(state, *args)` returns on every rank.

        Raises:
            AssertionError: with the traceback of a rank that raised or did not answer.
        """
        for connection in self._connections:
            connection.send((function, args))
        answers = []
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(TIMEOUT_S):
                    raise AssertionError(f"rank {rank} hangs in {function.__name__}{args}")
                answers.append(connection.recv())
            except EOFError:
                raise AssertionError(f"rank {rank} ended in {function.__name__}{args}: {self._failure}") from None
        for rank, (_, problem) in enumerate(answers):
            if problem:
                raise AssertionError(f"rank {rank}, {function.__name__}{args}:\n{problem}")
        return [value for value, _ in answers]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._listener.close()
        self._thread.join()

    def _launch(self, ranks: int) -> None:
        try:
            launch(_serve, (self._listener.address,), ranks=ranks)
        except (RankFailedError, ValueError) as error:
            self._failure = error


def _serve(address: tuple[str, int]) -> None:
    import torch.distributed as dist

    connection = Client(address)
    connection.send(dist.get_rank())
    state: dict[str, Any] = {}
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((function(state, *args), ""))
        except BaseException:
            connection.send((None, traceback.format_exc()))
