"""One rank of a small job on several nodes: `node_rank.py report FILE`, or `node_rank.py one_raises ERROR`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from trimtab.errors import InputError
from trimtab.launch import launch

MEBIBYTE = 1 << 20


def report(file: str) -> None:
    """Sum over all ranks, measure links, and write environment and rates of all ranks to a file."""
    total = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(total)
    seen: list[dict[str, object]] = [{}] * dist.get_world_size()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    mine: dict[str, object] = {name: os.environ[name] for name in names}
    mine |= {"namespace": os.readlink("/proc/self/ns/net"), "cores": sorted(os.sched_getaffinity(0))}
    mark = Path("/dev/shm/trimtab-test-mark")
    if dist.get_rank() == 0:
        mark.touch()
    dist.barrier()
    mine |= {"sees_mark": mark.exists(), "folder": os.getcwd()}
    dist.all_gather_object(seen, mine)
    mbit = {f"{source}-{target}": bandwidth(source, target) for source, target in ((0, 1), (2, 3), (0, 2), (3, 1))}
    content = {"sum": total.item(), "ranks": seen, "all_to_all_mbit": all_to_all_bandwidth(), "mbit": mbit}
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(content))


def bandwidth(source: int, target: int) -> float:
    """Mbit/s of 4 MiB from one rank to another."""
    payload = torch.empty(4 * MEBIBYTE, dtype=torch.uint8)

    def send() -> None:
        if dist.get_rank() == source:
            dist.send(payload, target)
        elif dist.get_rank() == target:
            dist.recv(payload, source)

    return payload.nbytes * 8e-6 / seconds_of(send)


def all_to_all_bandwidth() -> float:
    """Mbit/s that leave a node when each rank sends 1 MiB to each; half of it goes to the other of two nodes."""
    payload = torch.empty(dist.get_world_size() * MEBIBYTE, dtype=torch.uint8)
    seconds = seconds_of(lambda: dist.all_to_all_single(torch.empty_like(payload), payload))
    return payload.nbytes * int(os.environ["LOCAL_WORLD_SIZE"]) / 2 * 8e-6 / seconds


def seconds_of(send: Callable[[], object]) -> float:
    """Of the second call; the first one opens links."""
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        send()
        dist.barrier()
        seconds = time.perf_counter() - start
    return seconds


def one_raises(kind: str) -> None:
    if dist.get_rank() == 3:
        raise {"ArithmeticError": ArithmeticError, "InputError": InputError}[kind]("broken on purpose")
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    launch(globals()[sys.argv[1]], (sys.argv[2],), ranks=1)
