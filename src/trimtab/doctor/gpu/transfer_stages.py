"""Stages `bandwidth`, `rewriting`, `mirror` and `soak`: rates of links, and whether what is sent arrives."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from trimtab.calibration.measurement import MeasurementContext, add_random_layer, this_device
from trimtab.calibration.transfer_rates import measure_exchange, measure_links
from trimtab.cluster import QWEN3_30B, ClusterSpec, ModelSpec, load_cluster
from trimtab.cluster.presets import preset_like
from trimtab.doctor.finding import Finding
from trimtab.doctor.planned_micro_step import RandomDelays
from trimtab.figures import plural
from trimtab.report.number_text import bytes_text, rate
from trimtab.runtime import Session
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.rows.exchange import exchange_rows
from trimtab.runtime.transfer.message_rounds import Message, post
from trimtab.runtime.transfer.mirror import NodeMirror
from trimtab.runtime.transfer.peer_memory import PeerMemory
from trimtab.runtime.transfer.streams import BackgroundCopies

ROUNDS = 5
GPU_TOKENS, CPU_TOKENS = 8192, 512
CPU_MODEL = ModelSpec("doctor", 16, 4, hidden_size=256, expert_width=96)
# A smaller fraction of the expected rate is a warning.
LEAST = 0.5


def check_bandwidth() -> list[Finding]:
    """Measure all links on all ranks at once."""
    on_cuda = torch.cuda.is_available()
    context = MeasurementContext.of_all_ranks(
        QWEN3_30B if on_cuda else CPU_MODEL, tokens=GPU_TOKENS if on_cuda else CPU_TOKENS, sequence_length=1,
        rounds=ROUNDS,
    )  # fmt: skip
    links = measure_links(context, host_peers=True)
    exchange = measure_exchange(context).near
    pulled = links.messages is not None
    measured: dict[str, float | None] = {
        "host path": links.host,
        "copy-engine pulls": links.near if pulled else None,
        "messages": links.messages if pulled else links.near,
        "all-to-all": None if exchange is None else exchange.rates[0],
    }
    cluster = cluster_of(torch.cuda.get_device_name(), context.topology.num_ranks) if on_cuda else None
    return [compare_rate(name, value, cluster) for name, value in measured.items() if value is not None]


def cluster_of(gpu: str, ranks: int) -> ClusterSpec | None:
    """One node of the preset for a GPU of this name; None if there is none."""
    preset = preset_like(gpu)
    if preset.removesuffix("x8").removesuffix("-nvl72") not in gpu.lower():
        return None
    return load_cluster(preset, ranks=ranks, ranks_per_node=ranks)


def expected_rates(cluster: ClusterSpec) -> dict[str, float]:
    """Bytes a second by link, each way, from a cluster's preset; docs/clusters.md has the sources."""
    return {
        "host path": cluster.host_bytes_per_s,
        "copy-engine pulls": cluster.node_bytes_per_s,
        # By the same kernels as the all-to-all.
        "messages": cluster.dispatch_node_bytes_per_s,
        "all-to-all": cluster.dispatch_node_bytes_per_s,
    }


def compare_rate(name: str, measured: float, cluster: ClusterSpec | None) -> Finding:
    """The finding about one link, in bytes per second.

    Args:
        cluster: a preset of nodes with this GPU; None if nothing is expected.
    """
    if cluster is None:
        return Finding(name, "ok", rate(measured))
    expected = expected_rates(cluster)[name]
    text = f"{rate(measured)}, where {rate(expected)} is expected of {cluster.name}"
    if measured >= LEAST * expected:
        return Finding(name, "ok", text)
    return Finding(name, "warning", f"{text}; see docs/gpu.md for what slows it")


RENDEZVOUS = 3
REWRITES = 20
EXPERTS_PER_RANK = 2
MODEL = ModelSpec("doctor", EXPERTS_PER_RANK, 1, hidden_size=256, expert_width=64)


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


ENTRIES = 2000
LAYERS = 8
REFRESHES = 2
# Integers below it are exact in bfloat16.
VALUES = 251


def check_mirror() -> list[Finding]:
    """Fill mirrors, and compare their contents. The ranks are divided in two nodes, so that they also send experts."""
    device, ranks = this_device(), dist.get_world_size()
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
    return [describe_mirror(wrong, pinned=pinned, sent=sent, taken_s=taken_s, nodes=ranks // per_node)]


def describe_mirror(wrong: int, *, pinned: bool, sent: int, taken_s: float, nodes: int) -> Finding:
    """The finding about a mirror.

    Args:
        wrong: entries with other weights than their home has.
        pinned: the device can copy from it without a further copy on the host.
        sent: bytes that this rank sent to other nodes.
        taken_s: seconds of writing and comparing.
    """
    name = "contents"
    if wrong:
        text = f"{wrong} of {REFRESHES * ENTRIES} entries are wrong; do not train on this machine"
        return Finding(name, "problem", text)
    where = f"{ENTRIES:,} entries on each of {plural(nodes, 'node')}"
    text = f"{where} are right after {REFRESHES} refreshes, in {taken_s:.1f} s"
    if not pinned:
        return Finding(name, "warning", f"{text}; the memory is not pinned, so copies to the GPU are slower")
    return Finding(name, "ok", f"{text}; a rank sent {bytes_text(sent)}")


def _refreshed(number: int, layer: int, expert: int) -> int:
    """The value of all weights of an expert. Different for any two refreshes that follow each other."""
    return (number + 13 * layer + 3 * expert) % VALUES


GPU_SECONDS, CPU_SECONDS = 10.0, 2.0
GPU_MESSAGE, CPU_MESSAGE = 1 << 20, 1 << 10
# Messages to the next rank on each group, as replicas of several layers in transfer.
MESSAGES = 4
# Rounds between two decisions of the first rank whether to go on.
SOAK_ROUNDS = 16


def check_soak() -> list[Finding]:
    """Send on all groups at once, in an order that is the same on all ranks, and check what arrives."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return [Finding("groups", "ok", "skipped: it needs 2 ranks")]
    soak = _Soak.of_all_ranks()
    seconds = GPU_SECONDS if soak.device.type == "cuda" else CPU_SECONDS
    start = time.perf_counter()
    rounds, wrong, goes_on = 0, 0, True
    while goes_on:
        for _ in range(SOAK_ROUNDS):
            wrong += soak.run(rounds)
            rounds += 1
        answer = torch.tensor([time.perf_counter() - start < seconds])
        dist.broadcast(answer, 0, group=soak.topology.control)
        goes_on = bool(answer)
    what = f"{rounds} rounds of messages, all-to-alls and sums on all groups, one rank slow in each"
    if wrong:
        return [Finding("groups", "problem", f"{wrong} results were wrong in {what}; do not train on this machine")]
    text = f"{what}: all right; {bytes_text(rounds * soak.round_bytes)} sent by a rank"
    return [Finding("groups", "ok", f"{text} in {time.perf_counter() - start:.1f} s")]


@dataclass(frozen=True, eq=False)
class _Soak:
    """Groups and sizes.

    Attributes:
        topology: of all ranks; two expert-parallel groups if they have two ranks each, so that all groups differ.
        values: bfloat16 values of a message.
    """

    topology: Topology
    device: torch.device
    delays: RandomDelays
    values: int

    @classmethod
    def of_all_ranks(cls) -> _Soak:
        ranks, device = dist.get_world_size(), this_device()
        topology = Topology.build(None, 2 if ranks >= 4 and ranks % 2 == 0 else 1, None)
        values = GPU_MESSAGE if device.type == "cuda" else CPU_MESSAGE
        return cls(topology, device, RandomDelays(dist.get_rank()), values)

    @property
    def round_bytes(self) -> int:
        """Bytes of messages and all-to-all that a rank sends in a round."""
        return 2 * (2 * MESSAGES + self.topology.num_ranks - 1) * self.values

    def run(self, number: int) -> int:
        """Start transfers on all groups, then check them. Returns the number of wrong results."""
        topology, rank, ranks = self.topology, self.topology.rank, self.topology.num_ranks
        if number % topology.num_data_ranks == topology.data_rank:
            self.delays.pause(self.device)
        to, source = (rank + 1) % ranks, (rank - 1) % ranks
        works, arrived = [], []
        for group, kind in ((topology.weights, 1), (topology.gradients, 2)):
            for message in range(MESSAGES):
                value, tag = self._value(number, rank, kind, message), number * MESSAGES + message
                target = self._filled(-1)
                # In rank order on all ranks, as replicas are.
                messages = [Message(rank, to, self._filled(value)), Message(source, rank, target)]
                works += [posted.work for posted in post(sorted(messages, key=lambda m: m[0]), rank, group, tag=tag)]
                arrived.append((target, self._value(number, source, kind, message)))
        total = self._filled(rank + 1)[:1].float()
        works.append(dist.all_reduce(total, group=topology.data, async_op=True))
        rows = torch.cat([self._filled(self._value(number, rank, 3, other))[None] for other in range(ranks)])
        exchanged = exchange_rows(rows, [1] * ranks, [1] * ranks, topology.experts, tag=number)
        for work in works:
            work.wait()
        arrived += [(exchanged[other], self._value(number, other, 3, rank)) for other in range(ranks)]
        arrived.append((total, topology.groups * ranks * (ranks + 1) // 2))
        return sum(not bool((tensor == value).all()) for tensor, value in arrived)

    def _filled(self, value: int) -> torch.Tensor:
        return torch.full((self.values,), value, dtype=torch.bfloat16, device=self.device)

    def _value(self, number: int, rank: int, kind: int, message: int) -> int:
        """What a rank sends: an integer that is exact in bfloat16."""
        return (7 * number + 41 * rank + 101 * kind + 3 * message) % 251
