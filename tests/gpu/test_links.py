"""Stages `environment`, `bandwidth`, `rewriting`, `mirror` and `soak`: links, and whether what is sent arrives."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.random_pauses import pause
from trimtab.calibration.measurement import add_random_layer, this_device
from trimtab.cluster import ModelSpec
from trimtab.doctor.finding import Finding
from trimtab.doctor.gpu_environment import check_environment
from trimtab.doctor.gpu_stages import check_bandwidth
from trimtab.figures import plural
from trimtab.report.number_text import bytes_text
from trimtab.runtime import Session
from trimtab.runtime.program.exchange import exchange_rows
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.transfer.message_rounds import Message, post
from trimtab.runtime.transfer.mirror import NodeMirror
from trimtab.runtime.transfer.peer_memory import PeerMemory
from trimtab.runtime.transfer.streams import BackgroundCopies

Run = Callable[..., None]

WRONG = "do not train on this machine"
SKIPPED = "skipped: it needs 2 ranks"
# Integers below it are exact in bfloat16.
VALUES = 251


def test_environment(run: Run) -> None:
    if not torch.cuda.is_available():
        pytest.skip("it is that of GPUs")
    run("environment", check_environment)


def test_rates_of_links(run: Run) -> None:
    on_cpu = partial(check_bandwidth, ModelSpec("doctor", 16, 4, hidden_size=256, expert_width=96), 512)
    run("bandwidth", check_bandwidth if torch.cuda.is_available() else on_cpu)


def test_peers_read_what_was_written_last(run: Run) -> None:
    run("rewriting", check_rewriting)


def test_mirrors_hold_the_experts_of_all_ranks(run: Run) -> None:
    run("mirror", check_mirror)


def test_transfers_on_all_groups_at_once(run: Run) -> None:
    run("soak", check_soak)


RENDEZVOUS, REWRITES, EXPERTS_PER_RANK = 3, 20, 2


def check_rewriting() -> list[Finding]:
    """Map memory and rewrite it; every rank reads every expert of all ranks after each time."""
    name, ranks = "peer memory", dist.get_world_size()
    if ranks == 1:
        return [Finding(name, "ok", SKIPPED)]
    start = time.perf_counter()
    wrong = 0
    for rendezvous in range(RENDEZVOUS):
        wrong_here = _rewrite(rendezvous)
        if wrong_here is None:
            text = "the ranks can't read each other's memory, so replicas are sent as messages; see the log line"
            return [Finding(name, "warning", text)]
        wrong += wrong_here
    reads = RENDEZVOUS * REWRITES * ranks * EXPERTS_PER_RANK
    if wrong:
        return [Finding(name, "problem", f"{wrong} of {reads} experts had other weights than were written; {WRONG}")]
    taken = f"{time.perf_counter() - start:.1f} s"
    text = f"mapped {RENDEZVOUS} times and rewritten {REWRITES} times each; {reads} reads a rank were right, in {taken}"
    return [Finding(name, "ok", text)]


def _rewrite(rendezvous: int) -> int | None:
    """Map the memory once, and rewrite it. Returns the number of wrong reads of this rank; None without memory."""
    device, ranks = this_device(), dist.get_world_size()
    session = Session(num_experts=ranks * EXPERTS_PER_RANK)
    model = ModelSpec("doctor", EXPERTS_PER_RANK, 1, hidden_size=256, expert_width=64)
    homes = add_random_layer(session, model, torch.bfloat16, device).homes
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
            source[row].fill_(_written(rendezvous, number, session.rank, row))
        peers.fill(session.homes)
        for shift, row in itertools.product(range(ranks), range(EXPERTS_PER_RANK)):
            # Ranks read from different ranks at the same time.
            home = (session.rank + shift) % ranks
            copies.start(list(zip(slots, peers.row(0, home, row), strict=True)))()
            expected = _written(rendezvous, number, home, row)
            wrong += not all(bool((slot == expected).all()) for slot in slots)
    dist.barrier(group=session.topology.node_control)
    copies.close()
    session.close()
    return wrong


def _written(rendezvous: int, number: int, rank: int, row: int) -> int:
    """The value of all weights of an expert. Different for any two writes that follow each other."""
    return (17 * rendezvous + 5 * number + 31 * rank + row) % VALUES


ENTRIES, LAYERS, REFRESHES = 2000, 8, 2


def check_mirror() -> list[Finding]:
    """Fill mirrors, and compare their contents. The ranks are divided in two nodes, so that they also send experts."""
    name, device, ranks = "contents", this_device(), dist.get_world_size()
    per_node = ranks // 2 if ranks % 2 == 0 else 1
    experts_per_rank = -(-ENTRIES // (LAYERS * ranks))
    model = ModelSpec("doctor", experts_per_rank * ranks, 1, hidden_size=64, expert_width=16)
    session = Session(num_experts=model.num_experts, ranks_per_node=per_node)
    homes = [add_random_layer(session, model, torch.bfloat16, device).homes for _ in range(LAYERS)]
    mirror = NodeMirror(session.topology, homes[0].expert_like, device)
    pairs = np.stack(np.divmod(np.arange(ENTRIES), model.num_experts), axis=1)
    # Another order on each node.
    mirror.hold([np.random.default_rng(node).permutation(pairs) for node in range(ranks // per_node)])
    wrong, sent = 0, 0
    start = time.perf_counter()
    for number in range(REFRESHES):
        # No rank may still be reading.
        dist.barrier(group=session.topology.expert_control)
        for layer in homes:
            for row, expert in enumerate(layer.home_experts.tolist()):
                for source in layer.sources:
                    source[row].fill_(_refreshed(number, layer.index, expert))
        sent += mirror.refresh(homes)
        wrong += sum(
            not all(bool((tensor == _refreshed(number, layer, expert)).all()) for tensor in mirror.row(layer, expert))
            for layer, expert in pairs.tolist()
        )
    taken_s = time.perf_counter() - start
    pinned = device.type != "cuda" or mirror.row(*pairs[0].tolist())[0].is_pinned()
    mirror.close()
    session.close()
    if wrong:
        return [Finding(name, "problem", f"{wrong} of {REFRESHES * ENTRIES} entries are wrong; {WRONG}")]
    where = f"{ENTRIES:,} entries on each of {plural(ranks // per_node, 'node')}"
    text = f"{where} are right after {REFRESHES} refreshes, in {taken_s:.1f} s; a rank sent {bytes_text(sent)}"
    if not pinned:
        return [Finding(name, "warning", f"{text}; the memory is not pinned, so copies to the GPU are slower")]
    return [Finding(name, "ok", text)]


def _refreshed(number: int, layer: int, expert: int) -> int:
    """The value of all weights of an expert. Different for any two refreshes that follow each other."""
    return (number + 13 * layer + 3 * expert) % VALUES


GPU_SECONDS, CPU_SECONDS = 10.0, 2.0
# bfloat16 values of a message.
GPU_MESSAGE, CPU_MESSAGE = 1 << 20, 1 << 10
# Messages to the next rank on each group, as replicas of several layers in transfer.
MESSAGES = 4
# Rounds between two decisions of the first rank whether to go on.
SOAK_ROUNDS = 16


def check_soak() -> list[Finding]:
    """Send on all groups at once, in an order that is the same on all ranks, and check what arrives."""
    ranks, on_cuda = dist.get_world_size(), this_device().type == "cuda"
    if ranks == 1:
        return [Finding("groups", "ok", SKIPPED)]
    # Two expert-parallel groups if they have two ranks each, so that all groups differ.
    topology = Topology.build(None, 2 if ranks >= 4 and ranks % 2 == 0 else 1, None)
    start = time.perf_counter()
    rounds, wrong, goes_on = 0, 0, True
    random.seed(dist.get_rank())
    while goes_on:
        for _ in range(SOAK_ROUNDS):
            wrong += _exchange_on_all_groups(topology, rounds)
            rounds += 1
        answer = torch.tensor([time.perf_counter() - start < (GPU_SECONDS if on_cuda else CPU_SECONDS)])
        dist.broadcast(answer, 0, group=topology.control)
        goes_on = bool(answer)
    what = f"{rounds} rounds of messages, all-to-alls and sums on all groups, one rank slow in each"
    if wrong:
        return [Finding("groups", "problem", f"{wrong} results were wrong in {what}; {WRONG}")]
    sent = rounds * 2 * (2 * MESSAGES + topology.num_ranks - 1) * (GPU_MESSAGE if on_cuda else CPU_MESSAGE)
    text = f"{what}: all right; {bytes_text(sent)} sent by a rank in {time.perf_counter() - start:.1f} s"
    return [Finding("groups", "ok", text)]


def _exchange_on_all_groups(topology: Topology, number: int) -> int:
    """Start transfers on all groups, then check them. Returns the number of wrong results."""
    rank, ranks = topology.rank, topology.num_ranks
    if number % topology.num_data_ranks == topology.data_rank:
        pause(this_device())
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    works, arrived = [], []
    for group, kind in ((topology.weights, 1), (topology.gradients, 2)):
        for message in range(MESSAGES):
            value, tag = _value(number, rank, kind, message), number * MESSAGES + message
            target = _filled(-1)
            # In rank order on all ranks, as replicas are.
            messages = [Message(rank, to, _filled(value)), Message(source, rank, target)]
            works += [work for _, work in post(sorted(messages, key=lambda m: m[0]), rank, group, tag=tag)]
            arrived.append((target, _value(number, source, kind, message)))
    total = _filled(rank + 1)[:1].float()
    works.append(dist.all_reduce(total, group=topology.data, async_op=True))
    rows = torch.cat([_filled(_value(number, rank, 3, other))[None] for other in range(ranks)])
    exchanged = exchange_rows(rows, [1] * ranks, [1] * ranks, topology.experts, tag=number)
    for work in works:
        work.wait()
    arrived += [(exchanged[other], _value(number, other, 3, rank)) for other in range(ranks)]
    arrived.append((total, topology.groups * ranks * (ranks + 1) // 2))
    return sum(not bool((tensor == value).all()) for tensor, value in arrived)


def _filled(value: int) -> torch.Tensor:
    device = this_device()
    values = GPU_MESSAGE if device.type == "cuda" else CPU_MESSAGE
    return torch.full((values,), value, dtype=torch.bfloat16, device=device)


def _value(number: int, rank: int, kind: int, message: int) -> int:
    """What a rank sends: an integer that is exact in bfloat16."""
    return (7 * number + 41 * rank + 101 * kind + 3 * message) % VALUES
