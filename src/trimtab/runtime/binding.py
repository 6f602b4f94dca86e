"""What the layers of a running micro-step look up: recorded routing, layouts, and the transfers they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from trimtab.planner import StepPlan, Workload
from trimtab.runtime.layout import InstanceReplicas, Layout, place_rows, upload_layouts
from trimtab.runtime.memory import upload
from trimtab.runtime.recorder import Recorder
from trimtab.runtime.topology import Topology
from trimtab.trace import RoutingTrace
from trimtab.trace.routing import Array

if TYPE_CHECKING:
    from trimtab.runtime.layer import ExpertLayer
    from trimtab.runtime.transfers import Transfers


@dataclass(eq=False)
class MicroStep:
    """One micro-step, bound around its forward and backward.

    Attributes:
        positions: `[n]` where the tokens stand in the forward's rows, or None.
        recorded_LNK: recorded ids `[L, n, K]` int64, or None if the batch is not the one that was planned.
        known_N: `[n]` bool, tokens whose route is known; None if all are.
        layouts: one a layer if the micro-step is planned, else empty.
        visited: layers in the order in which they ran, forward and backward.
        with_backward: whether the first of them built a graph.
    """

    positions: torch.Tensor | None
    recorded_LNK: torch.Tensor | None = None
    known_N: torch.Tensor | None = None
    layouts: Sequence[Layout] = ()
    visited: list[int] = field(default_factory=list)
    with_backward: bool = False

    def replay(self, layer: int, live_ids: torch.Tensor) -> torch.Tensor:
        """Put the recorded ids into `live_ids [T, K]` int64; see `ExpertLayer.route`."""
        if self.recorded_LNK is None:
            return live_ids
        recorded = self.recorded_LNK[layer]
        chosen = live_ids if self.positions is None else live_ids.index_select(0, self.positions)
        if len(chosen) != len(recorded):
            raise RuntimeError(
                f"MoE layer {layer} got {len(chosen)} tokens; the micro-step was planned with {len(recorded)}"
            )
        if self.known_N is not None:
            recorded = torch.where(self.known_N[:, None], recorded, chosen)
        return recorded.clone() if self.positions is None else live_ids.index_copy(0, self.positions, recorded)


@dataclass(eq=False)
class RunningStep:
    """A step that this rank can run.

    Attributes:
        plan, workload: of the expert-parallel group.
        trace: this rank's own sequences, ordered by micro-step.
        runs: whether the plan is carried out, or micro-steps only replay their routing.
    """

    plan: StepPlan
    workload: Workload
    trace: RoutingTrace
    runs: bool

    def bind(
        self,
        index: int,
        layers: Sequence[ExpertLayer],
        topology: Topology,
        positions: torch.Tensor | None,
        sequence_hashes: Array | None,
    ) -> MicroStep:
        """One micro-step; see `Session.micro_step`."""
        if not 0 <= index < self.plan.num_micro_steps:
            raise IndexError(f"micro-step {index} of {self.plan.num_micro_steps}")
        trace = self.trace.select(np.flatnonzero(self.plan.schedule.of_rank(topology.rank) == index))
        if sequence_hashes is not None:
            agree = torch.tensor(int(np.array_equal(sequence_hashes, trace.sequence_hashes)))
            dist.all_reduce(agree, dist.ReduceOp.MIN, group=topology.expert_control)
            if not agree:
                return MicroStep(positions)
        device = layers[0].parameters[0].device
        (recorded_LNK,) = upload([trace.expert_ids.transpose(1, 0, 2).astype(np.int64)], device)
        if not self.plan.plannable[index]:
            (known_N,) = upload([(trace.expert_ids[:, :, 0] != trace.no_route).all(axis=1)], device)
            return MicroStep(positions, recorded_LNK, known_N)
        if not self.runs:
            return MicroStep(positions, recorded_LNK)
        placed = [
            place_rows(
                np.ascontiguousarray(trace.expert_ids[:, layer.index]),
                self.workload.token_counts_MLRE[index, layer.index],
                layer.home_E,
                topology.rank,
                InstanceReplicas.of(self.plan, index, layer.index),
            )
            for layer in layers
        ]
        return MicroStep(positions, recorded_LNK, None, upload_layouts(placed, device))


def exchange_layout(layer: ExpertLayer, expert_ids: torch.Tensor, topology: Topology) -> Layout:
    """The layout of an instance that nothing is known of, from an exchange of counts. Collective.

    Args:
        expert_ids: `[n, K]` of this rank's tokens.
    """
    ids_NK = expert_ids.cpu().numpy()
    counts = torch.from_numpy(np.bincount(ids_NK.reshape(-1), minlength=len(layer.home_E)))
    counts_R = [torch.empty_like(counts) for _ in range(topology.num_ranks)]
    dist.all_gather(counts_R, counts, group=topology.expert_control)
    replicas = InstanceReplicas.none(topology.num_ranks)
    counts_RE = torch.stack(counts_R).numpy()
    rows = place_rows(ids_NK, counts_RE, layer.home_E, topology.rank, replicas)
    return upload_layouts([rows], expert_ids.device)[0]


@dataclass(frozen=True, eq=False)
class Instance:
    """One layer of one micro-step on one rank, bound at forward and looked up again in backward.

    Attributes:
        layer: whose experts.
        layout: where rows go.
        positions: `[n]` int64, where the micro-step's tokens stand among the rows of `hidden`; None if they are all.
        group: the ranks that share the experts.
        micro_step: of a planned instance, else None.
        transfers: of a planned instance, else None.
        recorder: takes notes while somebody wants them.
    """

    layer: ExpertLayer
    layout: Layout
    positions: torch.Tensor | None
    group: dist.ProcessGroup
    micro_step: MicroStep | None = None
    transfers: Transfers | None = None
    recorder: Recorder | None = None

    def turn_to(self, activity: int) -> None:
        """This rank turns to something else; noted if somebody wants to know."""
        if self.recorder is not None:
            self.recorder.turn_to(activity, self.layer.index)

    def leave(self, activity: int) -> None:
        """This rank turns to something outside the layer; noted if somebody wants to know."""
        if self.recorder is not None:
            self.recorder.turn_to(activity)

    def approach(self) -> None:
        """The layer is about to run, forward or backward."""
        if self.micro_step is not None and self.transfers is not None:
            self.transfers.ring.approach(self.micro_step, self.layer.index, self.transfers.layers)

    def replica_weights(self) -> list[torch.Tensor]:
        """This rank's replicas, `[count, ...]` for each stacked tensor. Waits until they are there."""
        assert self.micro_step is not None
        assert self.transfers is not None
        return self.transfers.ring.replicas(self.micro_step, self.layer.index)

    def return_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send the gradients of `replica_weights` on their way home."""
        assert self.transfers is not None
        self.transfers.returns.start(self.layer, gradients, self.layout.replicas)

    def join_gradients(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Gradients of the home experts, `[E / R, ...]` for each stacked tensor, with those of all their replicas."""
        if self.transfers is None or not self.layout.replicas.count:
            return gradients
        return self.transfers.returns.join(self.layer, gradients)
