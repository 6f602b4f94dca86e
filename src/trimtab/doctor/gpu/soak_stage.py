"""Stage `soak`: all process groups of a session are in use at once for some seconds, while one rank is slow."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trimtab.calibration.random_experts import this_device
from trimtab.doctor.finding import Finding
from trimtab.doctor.random_delays import RandomDelays
from trimtab.report.number_text import bytes_text
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.rows.exchange import exchange_rows
from trimtab.runtime.transfer.message_rounds import Message, post

GPU_SECONDS, CPU_SECONDS = 10.0, 2.0
GPU_VALUES, CPU_VALUES = 1 << 20, 1 << 10
# Messages to the next rank on each group, as replicas of several layers in transfer.
MESSAGES = 4
# Rounds between two decisions of the first rank whether to go on.
ROUNDS = 16


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
        for _ in range(ROUNDS):
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
        values = GPU_VALUES if device.type == "cuda" else CPU_VALUES
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
