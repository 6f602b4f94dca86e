"""`MicroStep`: recorded routing and layouts of one micro-step; `RunningStep`: the plan that they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from trimtab.planner import StepPlan, Workload
from trimtab.runtime.home_experts import HomeExperts
from trimtab.runtime.layout import InstanceReplicas, Layout, place_rows, upload_layouts
from trimtab.runtime.memory import upload
from trimtab.runtime.topology import Topology
from trimtab.trace import RoutingTrace
from trimtab.trace.routing import Array


@dataclass(eq=False)
class MicroStep:
    """One micro-step, bound around its forward and backward.

    Attributes:
        positions: `[n]` where the tokens stand in the forward's rows, or None.
        recorded_LNK: recorded ids `[L, n, K]` int64, or None if the batch is not the one that was planned.
        known_N: `[n]` bool, tokens whose route is known; None if all are.
        layouts: one a layer if the micro-step is planned, else empty.
        index: its number in the step; -1 if nothing is known of it.
        plan_number: which of the session's plans it belongs to.
        visited: layers in the order in which they ran, forward and backward.
        with_backward: whether the first of them built a graph.
        routed: for each layer, address and version of the ids that its `route` returned last.
    """

    positions: torch.Tensor | None
    recorded_LNK: torch.Tensor | None = None
    known_N: torch.Tensor | None = None
    layouts: Sequence[Layout] = ()
    index: int = -1
    plan_number: int = 0
    visited: list[int] = field(default_factory=list)
    with_backward: bool = False
    routed: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def replays(self) -> bool:
        """Has it recorded routing?"""
        return self.recorded_LNK is not None

    def replay(self, layer: int, live_ids: torch.Tensor) -> torch.Tensor:
        """Put the recorded ids into `live_ids [T, K]` int64; see `HomeExperts.route`."""
        if self.recorded_LNK is None:
            return live_ids
        recorded = self.recorded_LNK[layer]
        chosen = live_ids if self.positions is None else live_ids.index_select(0, self.positions)
        if chosen.shape != recorded.shape:
            raise RuntimeError(
                f"MoE layer {layer} got {len(chosen)} tokens with {chosen.shape[1]} experts each; the micro-step was "
                f"planned with {len(recorded)} tokens with {recorded.shape[1]}"
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
        number: which of the session's plans it is.
        has_moved: whether experts have moved to other homes since.
    """

    plan: StepPlan
    workload: Workload
    trace: RoutingTrace
    runs: bool
    number: int
    has_moved: bool = False

    def problem(self, index: int) -> Exception | None:
        """What is wrong with binding a micro-step of this number."""
        if self.runs and self.has_moved:
            return RuntimeError("experts have moved since the plan was applied; plan the step again")
        if 0 <= index < self.plan.num_micro_steps:
            return None
        return IndexError(f"micro-step {index} of {self.plan.num_micro_steps}")

    def knows(self, index: int, sequence_hashes: Array | None, rank: int) -> bool:
        """Are these the sequences that were planned for a rank?"""
        if sequence_hashes is None:
            return True
        return np.array_equal(sequence_hashes, self.trace.sequence_hashes[self._sequences_of(index, rank)])

    def bind(
        self, index: int, layers: Sequence[HomeExperts], topology: Topology, positions: torch.Tensor | None
    ) -> MicroStep:
        """One micro-step, of which all ranks have the sequences that were planned. Not a collective."""
        trace = self.trace.select(self._sequences_of(index, topology.rank))
        device = layers[0].device
        (recorded_LNK,) = upload([trace.expert_ids.transpose(1, 0, 2).astype(np.int64)], device)
        if self.plan.mixed_ML[index].any():
            (known_N,) = upload([(trace.expert_ids[:, :, 0] != trace.no_route).all(axis=1)], device)
            return MicroStep(positions, recorded_LNK, known_N, index=index, plan_number=self.number)
        if not self.runs:
            return MicroStep(positions, recorded_LNK, index=index, plan_number=self.number)
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
        layouts = upload_layouts(placed, device)
        return MicroStep(positions, recorded_LNK, None, layouts, index=index, plan_number=self.number)

    def _sequences_of(self, index: int, rank: int) -> Array:
        return np.flatnonzero(self.plan.schedule.of_rank(rank) == index)
