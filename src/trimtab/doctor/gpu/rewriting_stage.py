"""Stage `rewriting`: ranks map each other's memory several times, and read what its owner has just written."""

from __future__ import annotations

import itertools
import time

import torch
import torch.distributed as dist

from trimtab.calibration.random_experts import add_random_layer, this_device
from trimtab.cluster import ModelSpec
from trimtab.doctor.finding import Finding
from trimtab.runtime import Session
from trimtab.runtime.transfer.peer_memory import PeerMemory
from trimtab.runtime.transfer.streams import BackgroundCopies

RENDEZVOUS = 3
REWRITES = 20
EXPERTS_PER_RANK = 2
MODEL = ModelSpec("doctor", EXPERTS_PER_RANK, 1, hidden_size=256, expert_width=64)
# Integers below it are exact in bfloat16.
VALUES = 251


def check_rewriting() -> list[Finding]:
    """Map memory and rewrite it; every rank reads every expert of all ranks after each time."""
    name, ranks = "peer memory", dist.get_world_size()
    if ranks == 1:
        return [Finding(name, "ok", "skipped: it needs 2 ranks")]
    start = time.perf_counter()
    wrong = 0
    for rendezvous in range(RENDEZVOUS):
        found = _rewrite(rendezvous)
        if found is None:
            text = "the ranks can't read each other's memory, so replicas are sent as messages; see the log line"
            return [Finding(name, "warning", text)]
        wrong += found
    reads = RENDEZVOUS * REWRITES * ranks * EXPERTS_PER_RANK
    if wrong:
        text = (
            f"{wrong} of {reads} experts had other weights than their owner had written; do not train on this machine"
        )
        return [Finding(name, "problem", text)]
    taken = f"{time.perf_counter() - start:.1f} s"
    text = f"mapped {RENDEZVOUS} times and rewritten {REWRITES} times each; {reads} reads a rank were right, in {taken}"
    return [Finding(name, "ok", text)]


def _rewrite(rendezvous: int) -> int | None:
    """Map the memory once, and rewrite it. Returns the number of wrong reads of this rank; None without memory."""
    device, ranks = this_device(), dist.get_world_size()
    session = Session(num_experts=ranks * EXPERTS_PER_RANK)
    homes = add_random_layer(session, MODEL, torch.bfloat16, device).homes
    make = PeerMemory.across if device.type == "cuda" else PeerMemory.in_host_memory
    peers = make(session.topology, session.homes)
    if peers is None:
        return None
    copies = BackgroundCopies(device)
    slots = [torch.empty_like(source[0]) for source in homes.sources]
    wrong = 0
    for number in range(REWRITES):
        # No rank may still be reading.
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(group=session.topology.node_control)
        for row, source in itertools.product(range(EXPERTS_PER_RANK), homes.sources):
            source[row].fill_(_weight(rendezvous, number, session.rank, row))
        peers.fill(session.homes)
        for shift, row in itertools.product(range(ranks), range(EXPERTS_PER_RANK)):
            # Ranks read from different ranks at the same time.
            home = (session.rank + shift) % ranks
            copies.start(list(zip(slots, peers.row(0, home, row), strict=True)))()
            expected = _weight(rendezvous, number, home, row)
            wrong += not all(bool((slot == expected).all()) for slot in slots)
    dist.barrier(group=session.topology.node_control)
    copies.close()
    session.close()
    return wrong


def _weight(rendezvous: int, number: int, rank: int, row: int) -> int:
    """The value of all weights of an expert. Different for any two writes that follow each other."""
    return (17 * rendezvous + 5 * number + 31 * rank + row) % VALUES
