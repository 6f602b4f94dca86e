"""`Transfers`: replica transfers of a session, and their preparation for each plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimtab.planner import StepPlan
from trimtab.planner.plan.slices import SliceRules
from trimtab.planner.replicas.paths import PEER
from trimtab.runtime.program.physical_experts import ReplicasOfStep
from trimtab.runtime.ranks.topology import Topology
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
        layers: all layers of the session.
        ring_layers: layers that replicas are kept for at the same time.
        verify_weights, mirror_bytes, peer_memory_bytes: see `Session`.

    Attributes:
        plan_number: number of the plan that transfers are prepared for.
        watch: detects changes of weights since copies were made.
    """

    def __init__(
        self,
        topology: Topology,
        layers: Sequence[HomeExperts],
        *,
        ring_layers: int,
        counters: Counters,
        verify_weights: bool,
        mirror_bytes: int | None = None,
        peer_memory_bytes: int | None = None,
    ) -> None:
        # Not on a CPU, where copies from the mirror are as fast.
        self._may_read_peers = streams.has_streams(layers[0].device)
        self._topology = topology
        self._most_peer_bytes = peer_memory_bytes
        self._is_live = False
        self.layers = layers
        self.plan_number = 0
        self.watch = WeightWatch(layers, verify=verify_weights)
        self.ring = ReplicaRing(
            topology,
            layers,
            buffers=ring_layers,
            mirror=NodeMirror(topology, layers[0].expert_like, layers[0].device, mirror_bytes),
            counters=counters,
        )
        # Gradients that are joined in backward are in transfer within one layer only.
        in_transfer = 1 if layers[0].joins_in_backward else ring_layers
        self.returns = GradientReturns(topology, layers=in_transfer, counters=counters)

    @property
    def peer_memory_bytes(self) -> int:
        """Bytes of this rank's memory that the other ranks of its node read replicas from; 0 if they get messages."""
        return 0 if self.ring.peers is None else self.ring.peers.nbytes

    def prepare(
        self,
        plan: StepPlan,
        replicas: ReplicasOfStep,
        number: int,
        slices: SliceRules | None,
        *,
        by_messages: bool = False,
    ) -> None:
        """Allocate memory for a plan. Nothing may be in transfer.

        Args:
            replicas: the plan's replicas, or those that follow.
            number: the plan's number in the session.
            slices: the rules of replicas that follow; None if the plan has all.
            by_messages: replicas from ranks of the same node are sent as messages, too.
        """
        self.plan_number = number
        if self._is_live and not self._may_read_peers:
            self.ring.peers = None
        self._is_live = False
        self.ring.prepare(replicas, number, plan.slots_per_rank)
        nodes = range(plan.num_ranks // plan.ranks_per_node)
        if slices is None:
            nothing = np.zeros((0, 2), np.int64)
            self.ring.mirror.hold([plan.mirror_entries(node) if plan.num_replicas else nothing for node in nodes])
        else:
            entries = slices.mirrors[self._topology.group]
            self.ring.mirror.hold([entries[entries[:, 0] == node, 1:] for node in nodes])
        near = bool(((plan.replica_paths == PEER) & ~plan.far_replicas).any()) or slices is not None
        if by_messages:
            self.ring.peers = None
        elif near and self.ring.peers is None and self._may_read_peers:
            self._read_peers()
        instance = np.repeat(np.arange(len(plan.replica_starts) - 1), np.diff(plan.replica_starts))
        home = plan.home[instance % plan.num_layers, plan.replica_experts]
        most = int(np.bincount(instance[home == self._topology.rank], minlength=1).max())
        self.returns.reserve(self.layers[0], most if slices is None else slices.most_returns)

    def prepare_live(self, replicas: ReplicasOfStep, number: int, slots: int, *, by_messages: bool) -> None:
        """Prepare for live micro-steps, whose replicas are not known yet. Nothing may be in transfer.

        Args:
            replicas: those that are chosen while micro-steps run.
            number: a number that no plan of the session has.
            slots: most replicas of one layer on a rank.
            by_messages: see `prepare`. Otherwise ranks of a node read each other's memory, on CPUs in shared memory.
        """
        self.plan_number = number
        self.ring.prepare(replicas, number, slots)
        nothing = np.zeros((0, 2), np.int64)
        self.ring.mirror.hold([nothing] * (self._topology.num_ranks // self._topology.ranks_per_node))
        if by_messages or self._topology.ranks_per_node == 1:
            self.ring.peers = None
        elif self.ring.peers is None:
            if self._may_read_peers:
                self._read_peers()
            elif not streams.has_streams(self.layers[0].device):
                self.ring.peers = PeerMemory.in_host_memory(self._topology, self.layers)
        self._is_live = True

    def _read_peers(self) -> None:
        """Let the ranks of a node read each other's memory, if they can. Once is enough to know."""
        self.ring.peers = PeerMemory.across(self._topology, self.layers, self._most_peer_bytes)
        self._may_read_peers = self.ring.peers is not None

    def close(self) -> None:
        """Release threads and memory. Backwards of its plan can't run any more."""
        self.ring.close()
        self.plan_number = -1

    def refresh(self) -> None:
        """Copy changed weights to staging memory, mirrors and symmetric memory."""
        self.ring.quiesce()
        for layer in self.layers:
            layer.stage()
        self.ring.refresh()
        self.watch.store()
