"""`Topology`: the process groups of a session. Which ranks share experts, a node, or the same homes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from trimtab.errors import InputError


@dataclass(frozen=True, eq=False)
class Topology:
    """Where this rank stands. Expert-parallel groups are neighbouring data ranks, nodes neighbouring ranks of a group.

    Attributes:
        data: all data ranks.
        experts: the ranks that share one set of experts; dispatch runs here.
        expert_dp_group: the ranks of all groups that are home to the same experts; None if there is one group.
        weights, gradients: the ranks of `experts` once more, for point-to-point traffic beside the dispatch.
        control: all data ranks, on the host.
        expert_control, node_control: the ranks of `experts`, and those of them on this node, on the host.
        rank, num_ranks: in `experts`.
        ranks_per_node: of `experts`.
        group, groups: which expert-parallel group this is, of how many.
        timeout: of all groups that are made here.
    """

    data: dist.ProcessGroup
    experts: dist.ProcessGroup
    expert_dp_group: dist.ProcessGroup | None
    weights: dist.ProcessGroup
    gradients: dist.ProcessGroup
    control: dist.ProcessGroup
    expert_control: dist.ProcessGroup
    node_control: dist.ProcessGroup
    rank: int
    num_ranks: int
    ranks_per_node: int
    group: int
    groups: int
    timeout: timedelta

    @classmethod
    def build(
        cls, data: dist.ProcessGroup | None, groups: int, ranks_per_node: int | None, timeout: timedelta | None = None
    ) -> Topology:
        """Make all groups. A collective over `data`, all ranks by default.

        Args:
            timeout: of the groups; that of `data` by default.

        Raises:
            InputError: if the groups don't divide the ranks, or the nodes a group.
        """
        data = data or dist.group.WORLD
        if data is None:
            raise RuntimeError("a Session needs torch.distributed; call init_process_group first")
        members = dist.get_process_group_ranks(data)
        num_data_ranks, data_rank = len(members), dist.get_rank(data)
        if groups < 1 or num_data_ranks % groups:
            raise InputError(f"{groups} expert-parallel groups don't divide {num_data_ranks} ranks")
        if ranks_per_node is not None and ranks_per_node < 1:
            raise InputError(f"ranks_per_node is {ranks_per_node}; it should be 1 or more")
        timeout = timeout or _timeout_of(data)
        make = partial(_group, timeout=timeout)
        num_ranks = num_data_ranks // groups
        group, rank = divmod(data_rank, num_ranks)
        per_node = ranks_per_node or num_ranks
        if num_ranks % per_node:
            raise InputError(f"{per_node} ranks a node don't divide the {num_ranks} ranks of an expert-parallel group")
        mine = members[group * num_ranks : (group + 1) * num_ranks]
        control = make(members, "control", "gloo")
        experts = data if groups == 1 else make(mine, "experts")
        expert_control = control if groups == 1 else make(mine, "control", "gloo")
        node = rank // per_node
        neighbours = mine[node * per_node : (node + 1) * per_node]
        return cls(
            data=data,
            experts=experts,
            expert_dp_group=None if groups == 1 else make(members[rank::num_ranks], "expert data parallel"),
            weights=make(mine, "weights"),
            gradients=make(mine, "gradients"),
            control=control,
            expert_control=expert_control,
            node_control=expert_control if per_node == num_ranks else make(neighbours, "control", "gloo"),
            rank=rank,
            num_ranks=num_ranks,
            ranks_per_node=per_node,
            group=group,
            groups=groups,
            timeout=timeout,
        )

    @property
    def data_rank(self) -> int:
        return self.group * self.num_ranks + self.rank

    @property
    def num_data_ranks(self) -> int:
        return self.groups * self.num_ranks

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node


# Groups by default group, ranks, use and timeout. Sessions of one process share them, since a process can't make groups
# without limit. torch keeps them until they are destroyed; their threads should not outlive that.
_made: WeakValueDictionary[tuple[int, tuple[int, ...], str, timedelta], dist.ProcessGroup] = WeakValueDictionary()


def _group(ranks: Sequence[int], use: str, backend: str | None = None, *, timeout: timedelta) -> dist.ProcessGroup:
    key = (id(dist.group.WORLD), tuple(ranks), use, timeout)
    group = _made.get(key)
    if group is None:
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True)
        assert group is not None
        # NCCL wants every rank of a group in its first call. A barrier would be gloo's, if the group has that too.
        if "nccl" in dist.get_backend_config(group):
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        else:
            dist.barrier(group=group)
        _made[key] = group
    return group


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The shortest of a group's backends."""
    timeouts = [group._get_backend(device).options._timeout for device in group._device_types]
    return min(timeouts)
