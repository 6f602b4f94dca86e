"""`Transfers`: what moves replicas between the ranks of a session, made ready for one plan after another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimtab.planner import StepPlan
from trimtab.planner.replicas.paths import PEER
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.rows.instance_replicas import PlanReplicas
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.state.weight_watch import WeightWatch
from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.mirror import NodeMirror
from trimtab.runtime.transfer.peer_memory import PeerMemory
from trimtab.runtime.transfer.returns import GradientReturns
from trimtab.runtime.transfer.ring import ReplicaRing


class Transfers:
    """Replica transfers: weights to slots, gradients to home ranks. Methods are collective.

    Args:
        layers: all of the session's.
        slots: replicas of one layer that a rank has room for.
        ring_layers: layers that replicas are kept for at a time.
        verify_weights: compare sampled elements of experts where nothing else says that they changed.

    Attributes:
        plan_number: of the plan that this is ready for.
        watch: tells whether weights changed since copies were made.
    """

    def __init__(
        self,
        topology: Topology,
        layers: Sequence[HomeExperts],
        *,
        slots: int,
        ring_layers: int,
        counters: Counters,
        verify_weights: bool,
    ) -> None:
        self._has_streams = streams.has_streams(layers[0].device)
        self._topology = topology
        self.layers = layers
        self.plan_number = 0
        self.watch = WeightWatch(layers, verify=verify_weights)
        self.ring = ReplicaRing(
            topology,
            layers,
            slots=slots,
            places=ring_layers,
            mirror=NodeMirror(topology, layers[0].expert_like, pinned=self._has_streams),
            counters=counters,
        )
        # What is joined in backward is under way within one layer alone.
        under_way = 1 if layers[0].joins_in_backward else ring_layers
        self.returns = GradientReturns(topology, layers=under_way, counters=counters)

    @property
    def pool_bytes(self) -> int:
        """Memory of this rank for replicas and arriving gradients."""
        return self.ring.nbytes + self.returns.nbytes

    @property
    def mirror_bytes(self) -> int:
        """Host memory of this rank's node."""
        return self.ring.mirror.nbytes

    def prepare(self, plan: StepPlan, replicas: PlanReplicas, number: int) -> None:
        """Make room for what a plan needs. Nothing is under way.

        Args:
            replicas: the plan's.
            number: which of the session's plans it is.
        """
        self.plan_number = number
        self.ring.prepare(replicas, number)
        nodes = range(plan.num_ranks // plan.ranks_per_node)
        self.ring.mirror.hold([plan.mirror_entries(node) for node in nodes])
        near = (plan.replica_paths == PEER) & ~plan.far_replicas
        if self._has_streams and self.ring.peers is None and near.any():
            self.ring.peers = PeerMemory.across(self._topology, self.layers)
        instance = np.repeat(np.arange(len(plan.replica_starts) - 1), np.diff(plan.replica_starts))
        home = plan.home[instance % plan.num_layers, plan.replica_experts]
        most = int(np.bincount(instance[home == self._topology.rank], minlength=1).max())
        self.returns.reserve(self.layers[0], most)

    def refresh(self) -> None:
        """Bring changed weights into staging memory and to where replicas are copied from."""
        self.ring.quiesce()
        for layer in self.layers:
            layer.stage()
        self.ring.refresh()
        self.watch.remember()
