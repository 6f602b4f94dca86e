"""`PlannedMicroStep`: one micro-step of MoE layers with replicas on one path, as the checks run it on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist

from trimtab.cluster import ClusterSpec
from trimtab.planner import Placement, Schedule, StepPlan, Workload
from trimtab.planner.replicas.paths import HOST, PEER
from trimtab.rank_variables import rank_variable
from trimtab.runtime.program.grouped_products import gated_experts
from trimtab.runtime.session import Session
from trimtab.runtime.session_settings import Paths
from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.peer_memory import PeerMemory
from trimtab.trace import RoutingTrace, synthesize

PATHS: tuple[Paths, ...] = tuple(path for path in get_args(Paths) if path != "both")


@dataclass(frozen=True)
class StepSizes:
    """Sizes of the layers and the tokens.

    Attributes:
        layers: by default more than the ring has places, so that backward has to fetch replicas again.
        hidden, width: of a token, and of an expert.
        tokens_per_rank: one sequence of each rank.
        zipf: skew of the routing; 0 is even.
        dtype: of parameters and compute.
    """

    layers: int = 4
    experts_per_rank: int = 4
    top_k: int = 2
    hidden: int = 16
    width: int = 8
    tokens_per_rank: int = 64
    zipf: float = 1.0
    dtype: torch.dtype = torch.float64

    def trace(self, ranks: int) -> RoutingTrace:
        """The routing of all ranks, the same on each: sequence r is that of rank r."""
        return synthesize(
            num_sequences=ranks, sequence_length=self.tokens_per_rank, num_layers=self.layers,
            num_experts=ranks * self.experts_per_rank, top_k=self.top_k, zipf=self.zipf,
        )  # fmt: skip

    def shapes(self, experts: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of gate and up, and of down, of some experts."""
        return (experts, 2 * self.width, self.hidden), (experts, self.hidden, self.width)


class OneRankPlan(StepPlan):
    """A plan whose replicas are on the home rank, which `StepPlan.check_form` would refuse."""

    def check_form(self, *shape: int) -> None:
        pass


class PlannedMicroStep:
    """Layers in a session, and an applied plan: in every layer each rank's busiest expert has a replica on the next
    rank, for half of its tokens. Methods are collective.

    On CUDA the path `peer` is what the session finds, memory of the GPUs or messages; on a CPU it is shared memory.
    With one rank the replica is on the expert's home, which only the path `host` supports.

    Args:
        weights: of each layer: router `[E, hidden]`, and of this rank's home experts gate and up
            `[E / R, 2 * width, hidden]` and down `[E / R, hidden, width]`.

    Attributes:
        parameters: the same tensors as Parameters.
        plan: the applied plan.
    """

    def __init__(self, sizes: StepSizes, path: Paths, weights: Sequence[Sequence[torch.Tensor]]) -> None:
        ranks = dist.get_world_size()
        self.session = session = Session(
            num_experts=ranks * sizes.experts_per_rank,
            ranks_per_node=rank_variable("LOCAL_WORLD_SIZE", ranks),
            paths="message" if path == "message" else "both",
            # On CUDA it would wait for the device.
            verify_weights=False,
        )
        self._sizes = sizes
        self.parameters = [[torch.nn.Parameter(tensor.clone()) for tensor in layer] for layer in weights]
        self._layers = [session.add_layer([gate_up, down], gated_experts()) for _, gate_up, down in self.parameters]
        device = self._layers[0].homes.device
        ring = session.transfers.ring
        if path == "peer" and not streams.has_streams(device) and ranks > 1:
            ring.peers = PeerMemory.in_host_memory(session.topology, session.homes)
        trace = sizes.trace(ranks)
        schedule = Schedule(np.zeros(ranks, np.int32), np.arange(ranks, dtype=np.int32), np.zeros(1, np.int32), ranks)
        self.plan = _plan(trace, schedule, HOST if path == "host" else PEER, session.topology.ranks_per_node)
        self.report = session.apply_step_plan(self.plan, trace.select(schedule.sequences_of(session.rank)))

    @property
    def reads_peers(self) -> bool:
        """Whether replicas of the path `peer` are read from the memory of other ranks."""
        return self.session.transfers.peer_memory_bytes > 0

    def forward_backward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Forward and backward of the loss `(output * target).sum()`, while the micro-step is open.

        Args:
            hidden, target: of this rank's tokens, `[n, hidden]`.

        Returns:
            The output `[n, hidden]`.
        """
        for layer, (router, _, _) in zip(self._layers, self.parameters, strict=True):
            logits = hidden @ router.T
            ids = layer.route(logits.topk(self._sizes.top_k).indices)
            hidden = hidden + layer(hidden, ids, logits.softmax(-1).gather(1, ids))
        hidden.backward(target)
        return hidden.detach()

    def run(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The whole micro-step; see `forward_backward`. Gradients are added to those of `parameters`."""
        with self.session.micro_step(0):
            output = self.forward_backward(hidden, target)
        self.session.finish_gradients([router for router, _, _ in self.parameters])
        return output


def _plan(trace: RoutingTrace, schedule: Schedule, path: int, ranks_per_node: int) -> StepPlan:
    """A plan with a replica of each rank's busiest expert on the next rank, for half of its tokens, in every layer."""
    ranks = schedule.num_ranks
    placement = Placement.contiguous(trace.num_layers, trace.num_experts, ranks)
    workload = Workload.from_trace(trace, schedule)
    replicas, quotas = [], []
    for counts_RE in workload.token_counts_MLRE[0]:
        first_R = np.arange(ranks) * (trace.num_experts // ranks)
        busiest_R = counts_RE.sum(axis=0).reshape(ranks, -1).argmax(axis=1) + first_R
        replicas.append(np.stack([busiest_R, (np.arange(ranks) + 1) % ranks], axis=1))
        quotas.append(counts_RE[:, busiest_R].T.astype(np.int64) // 2)
    cluster = ClusterSpec(ranks, ranks_per_node, slots_per_rank=1)
    kind = StepPlan if ranks > 1 else OneRankPlan
    plan = kind.from_instances(schedule, placement, replicas, quotas, mixed_ML=workload.mixed_ML, cluster=cluster)
    return replace(plan, replica_paths=np.full(plan.num_replicas, path, np.uint8))
