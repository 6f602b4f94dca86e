"""`ClusterSpec`: ranks of an expert-parallel group, and rates of the ranks and their links."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from trimtab.errors import InputError

# Operations or bytes a second, and bytes; a smaller figure was probably meant in another unit.
SLOWEST = 1e6
_RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (
        ("node_bytes_per_s", "network_bytes_per_s", "host_bytes_per_s"),
        lambda rate: rate == 0 or SLOWEST <= rate < math.inf,
        f"{SLOWEST:,.0f} or more, or 0 for none",
    ),
    (
        ("expert_flops", "dense_flops", "attention_flops", "memory_bytes_per_s", "dispatch_node_bytes_per_s",
         "dispatch_network_bytes_per_s", "device_bytes"),
        lambda rate: SLOWEST <= rate < math.inf,
        f"{SLOWEST:,.0f} or more",
    ),
    # Fixed times of a kernel or a collective; a second or more was probably meant in another unit.
    (("copy_s", "layer_s", "dispatch_s"), lambda seconds: 0 <= seconds < 1, "0 or more seconds, and below 1"),
    (("dense_backward", "expert_backward"), lambda ratio: 0 < ratio < math.inf, "above 0"),
    (("transfer_tax",), lambda part: 0 <= part <= 1, "from 0 to 1"),
    (("tile_rows", "planning_threads"), lambda count: count >= 1, "1 or more"),
)  # fmt: skip
# Where the number of slots is not given, one of these is chosen: the fewest that are about as fast as any.
AUTO = "auto"
AUTO_SLOTS = (2, 4, 8, 16)


def slot_numbers(slots: int | str) -> tuple[int, ...]:
    """Numbers of slots of a rank to choose from: of `AUTO` several, ascending, else the given one."""
    return AUTO_SLOTS if slots == AUTO else (int(slots),)


# More than a model has experts; the planner has memory for all slots.
MOST_SLOTS = 4096
# Layers with replicas in shared slots at the same time: one in use and two prefetched.
RING_LAYERS = 3


@dataclass(frozen=True)
class ClusterSpec:
    """The ranks of one expert-parallel group, and the rates of the kind of node that they are on.

    Defaults are those of the preset `h100x8`, whose file gives their sources.

    Attributes:
        ranks: ranks in the group, R.
        ranks_per_node: neighbouring ranks that share a node.
        slots_per_rank: replicas that a rank can hold in every MoE layer.
        expert_flops: operations a second of a rank's grouped matrix products.
        node_bytes_per_s: a rank's link inside its node, each way.
        network_bytes_per_s: a rank's link between nodes, each way.
        host_bytes_per_s: a rank's link from its node's host memory.
        mirror_experts: experts, each of one layer, that the mirror in a node's host memory can hold; None for all.
        name: of the kind of node.
        dense_flops: operations a second of projections and other large matrix products.
        attention_flops: operations a second of attention itself, the products with keys and values.
        memory_bytes_per_s: of a rank's own memory, as kernels reach it.
        tile_rows: rows of a tile of a grouped product; a partial tile costs as much as a full one.
        copy_s: fixed seconds of each copy of an expert in a grouped product.
        layer_s: fixed seconds of a layer's other kernels, launches and small operations together, in one pass.
        dense_backward, expert_backward: time of backward over that of forward, of the dense parts and of experts.
        dispatch_node_bytes_per_s: rate of a rank's all-to-all inside its node, each way, without rows that stay on the
            rank.
        dispatch_network_bytes_per_s: rate of a rank's all-to-all between nodes, each way, without rows that stay on the
            node.
        dispatch_forwards: true: a token is sent once to a node, to the rank with the same local index, and from there
            once to each rank (as with DeepEP); false: once to the rank of each of its experts (a plain all-to-all).
        dispatch_s: fixed seconds of an all-to-all.
        transfer_tax: what a transfer of an expert's weights or gradient takes from compute on each of its ranks, as a
            part of its seconds: processors that send and receive, and traffic in memory.
        device_bytes: a rank's own memory.
        planning_threads: cores that plan a step during the rollout.

    A link of 0 bytes a second transfers no weights. Without a link from host memory, all are sent from rank to rank.

    Raises:
        InputError: if the nodes don't divide the ranks, a figure is out of range, or some replicas have no path.
    """

    ranks: int
    ranks_per_node: int
    slots_per_rank: int = 2
    expert_flops: float = 4e14
    node_bytes_per_s: float = 450e9
    network_bytes_per_s: float = 50e9
    host_bytes_per_s: float = 55e9
    mirror_experts: int | None = None
    name: str = "h100x8"
    dense_flops: float = 6e14
    attention_flops: float = 4e14
    memory_bytes_per_s: float = 2.8e12
    tile_rows: int = 128
    copy_s: float = 1e-6
    layer_s: float = 60e-6
    dense_backward: float = 2.0
    expert_backward: float = 2.0
    dispatch_node_bytes_per_s: float = 295e9
    dispatch_network_bytes_per_s: float = 45e9
    dispatch_forwards: bool = True
    dispatch_s: float = 30e-6
    transfer_tax: float = 0.15
    device_bytes: float = 80e9
    planning_threads: int = 16

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1 or self.ranks % self.ranks_per_node:
            raise InputError(
                f"{self.ranks} ranks with {self.ranks_per_node} a node don't make whole nodes; "
                f"ranks per node should divide the ranks{self._closest_nodes()}"
            )
        if not 0 <= self.slots_per_rank <= MOST_SLOTS:
            raise InputError(f"slots per rank is {self.slots_per_rank}; it should be from 0 to {MOST_SLOTS}")
        for names, is_valid, range_text in _RANGES:
            for name in names:
                if not is_valid(getattr(self, name)):
                    raise InputError(f"{name} is {getattr(self, name)}; it should be {range_text}")
        if self.mirror_experts is not None and self.mirror_experts < 0:
            raise InputError(f"mirror_experts is {self.mirror_experts}; it should be 0 or more, or None for all")
        if (not self.host_bytes_per_s or self.mirror_experts is not None) and not (
            self.node_bytes_per_s and self.network_bytes_per_s
        ):
            raise InputError(
                f"some replicas have no path: node_bytes_per_s is {self.node_bytes_per_s:g}, network_bytes_per_s "
                f"{self.network_bytes_per_s:g}, host_bytes_per_s {self.host_bytes_per_s:g}, mirror_experts "
                f"{self.mirror_experts}; the first two should be above 0, or the third with mirror_experts None"
            )

    def _closest_nodes(self) -> str:
        """The largest nodes of at most `ranks_per_node` that divide the ranks, for a message."""
        if self.ranks < 1 or self.ranks_per_node < 1:
            return ""
        most = next(n for n in range(min(self.ranks, self.ranks_per_node), 0, -1) if self.ranks % n == 0)
        return f", for example {most}"
