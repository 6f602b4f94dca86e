"""`Topology`: the process groups of a session: ranks of an expert-parallel group, of a node, or with the same homes.

Expert-parallel groups are created from neighbouring ranks (`build`), or given by a framework, of any ranks (`given`).
Within an expert-parallel group ranks are numbered so that those of a node are neighbours, whatever the order of the
framework's group. All groups that are created here have that order.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from weakref import WeakSet

import numpy as np
import torch.distributed as dist

from trimtab.errors import InputError
from trimtab.planner import Placement
from trimtab.runtime.ranks.process_groups import destroy_groups, group_of, inner_group, ranks_of, timeout_of


@dataclass(eq=False)
class Topology:
    """Process groups and this rank's numbers in them.

    Data rank d is rank d mod R of expert-parallel group d div R; ranks of a node are neighbours in their group.

    Attributes:
        data: all data ranks.
        experts: the ranks that share one set of experts; dispatch runs here.
        expert_dp_group: the ranks of all expert-parallel groups with the same home experts, in any order; None for one
            group.
        weights, gradients: further groups of the ranks of `experts`, for point-to-point messages beside the dispatch.
        control: all data ranks, for host tensors.
        expert_control, node_control: the ranks of `experts`, and those of them on this node, for host tensors.
        leaders: the first ranks of all expert-parallel groups, for host tensors; None on others, and for one group.
        planning, planning_data: the ranks of `experts`, and all data ranks, for host tensors of the planner's threads.
        rank, num_ranks: this rank's number in `experts`, and their number R.
        ranks_per_node: ranks of `experts` on each node.
        group, groups: number of this expert-parallel group, and number of groups.
        positions: position of every rank of `experts` in the framework's group. The rank at position i is home to the
            i-th part of the experts.
        timeout: timeout of all groups that are created here.
    """

    data: dist.ProcessGroup
    experts: dist.ProcessGroup
    expert_dp_group: dist.ProcessGroup | None
    weights: dist.ProcessGroup
    gradients: dist.ProcessGroup
    control: dist.ProcessGroup
    expert_control: dist.ProcessGroup
    node_control: dist.ProcessGroup
    leaders: dist.ProcessGroup | None
    planning: dist.ProcessGroup
    planning_data: dist.ProcessGroup
    rank: int
    num_ranks: int
    ranks_per_node: int
    group: int
    groups: int
    positions: tuple[int, ...]
    timeout: timedelta

    def __post_init__(self) -> None:
        _in_use.add(self)

    @property
    def has_groups(self) -> bool:
        """Whether it has process groups; not after `drop_groups`."""
        return self in _in_use

    def release(self) -> None:
        """Let `drop_groups` of other sessions destroy the groups of this one, whose end ranks would otherwise notice at
        different times. Not a collective."""
        _in_use.discard(self)

    def drop_groups(self) -> None:
        """Destroy the groups that were created here, but for those that other sessions use. Collective."""
        self.release()
        names = [field.name for field in fields(self) if isinstance(getattr(self, field.name), dist.ProcessGroup)]
        destroy_groups({getattr(other, name) for other in _in_use for name in names})
        for name in names:
            delattr(self, name)

    def take_groups(self, other: Topology) -> None:
        """Use the process groups of another topology, which is not used any more, of the same ranks.

        Raises:
            InputError: if its ranks are others.
        """
        numbers = "rank", "num_ranks", "ranks_per_node", "group", "groups", "positions"
        before, now = ({name: getattr(each, name) for name in numbers} for each in (self, other))
        if before != now:
            raise InputError(f"a suspended session goes on with the ranks that it had, {before}, not with {now}")
        vars(self).update(vars(other))
        _in_use.discard(other)
        _in_use.add(self)

    @classmethod
    def build(
        cls, data: dist.ProcessGroup | None, groups: int, ranks_per_node: int | None, timeout: timedelta | None = None
    ) -> Topology:
        """Create all groups. A collective over `data`, all ranks by default.

        Args:
            timeout: timeout of the groups; that of `data` by default, or `LONGEST_WAIT` if that is shorter.

        Raises:
            InputError: if the groups don't divide the ranks, or the nodes a group.
        """
        data = data or dist.group.WORLD
        if data is None:
            raise RuntimeError("a Session needs torch.distributed; call init_process_group first")
        members = ranks_of("group", data)
        if groups < 1 or len(members) % groups:
            raise InputError(f"{groups} expert-parallel groups don't divide {len(members)} ranks")
        if ranks_per_node is not None and ranks_per_node < 1:
            raise InputError(f"ranks_per_node is {ranks_per_node}; it should be 1 or more")
        num_ranks = len(members) // groups
        per_node = ranks_per_node or num_ranks
        if num_ranks % per_node:
            raise InputError(f"{per_node} ranks a node don't divide the {num_ranks} ranks of an expert-parallel group")
        ranks_GR = [members[start : start + num_ranks] for start in range(0, len(members), num_ranks)]
        return cls._make(
            ranks_GR, tuple(range(num_ranks)), per_node, timeout or timeout_of(data), like=data, data=data,
            experts=data if groups == 1 else None,
        )  # fmt: skip

    @classmethod
    def given(
        cls,
        expert_group: dist.ProcessGroup,
        expert_dp_group: dist.ProcessGroup | None,
        nodes: Sequence[int] | None,
        timeout: timedelta | None = None,
    ) -> Topology:
        """Use a framework's groups, of any ranks in any order. A collective over the ranks of the groups that
        `expert_dp_group` joins, and no others.

        Args:
            expert_group: the ranks that share one set of experts. The rank at position i holds the i-th part of them.
            expert_dp_group: the ranks that hold the same experts as this one. A rank's position in it is the number of
                its expert-parallel group. None for one expert-parallel group.
            nodes: the node of every rank of `expert_group`, in its order, with any numbers; one node by default.
            timeout: timeout of the created groups; that of `expert_group` by default, or `LONGEST_WAIT` if that is
                shorter.

        Raises:
            InputError: if this rank is not in its groups. On all ranks: if nodes have different numbers of ranks, or
                the groups don't line up.
        """
        expert_group = inner_group(expert_group)
        expert_dp_group = None if expert_dp_group is None else inner_group(expert_dp_group)
        expert_ranks = tuple(ranks_of("expert_group", expert_group))
        timeout = timeout or timeout_of(expert_group)
        dp_ranks: tuple[int, ...] = (dist.get_rank(),)
        nodes_R: tuple[int, ...] = (0,) * len(expert_ranks)
        problem = None
        try:
            if expert_dp_group is not None:
                dp_ranks = tuple(ranks_of("expert_dp_group", expert_dp_group))
            if nodes is not None:
                nodes_R = _number_nodes(nodes, len(expert_ranks))
        except InputError as error:
            problem = str(error)
        by_position_GR = _line_up(_exchange(_Membership(expert_ranks, dp_ranks, nodes_R, problem), timeout))
        positions = tuple(sorted(range(len(nodes_R)), key=nodes_R.__getitem__))
        return cls._make(
            [[ranks_R[position] for position in positions] for ranks_R in by_position_GR],
            positions,
            nodes_R.count(0),
            timeout,
            like=expert_group,
            experts=expert_group if positions == tuple(range(len(positions))) else None,
            expert_dp_group=expert_dp_group if len(by_position_GR) > 1 else None,
        )

    @classmethod
    def _make(
        cls,
        ranks_GR: Sequence[Sequence[int]],
        positions: tuple[int, ...],
        ranks_per_node: int,
        timeout: timedelta,
        *,
        like: dist.ProcessGroup,
        data: dist.ProcessGroup | None = None,
        experts: dist.ProcessGroup | None = None,
        expert_dp_group: dist.ProcessGroup | None = None,
    ) -> Topology:
        """Create the groups that are not given. Collective over all ranks of all expert-parallel groups.

        Args:
            ranks_GR: the global ranks of all expert-parallel groups, those of a node next to each other.
            like: a group whose backend is used for tensors.
        """
        members = [rank for ranks_R in ranks_GR for rank in ranks_R]
        groups, num_ranks = len(ranks_GR), len(positions)
        group, rank = divmod(members.index(dist.get_rank()), num_ranks)
        mine = ranks_GR[group]
        make = partial(group_of, timeout=timeout, backend=dist.get_backend(like))
        on_host = partial(group_of, timeout=timeout, backend="gloo")
        control = on_host(members, "control")
        if data is None and groups > 1:
            data = make(members, "data")
        experts = experts or make(mine, "experts")
        expert_control = control if groups == 1 else on_host(mine, "control")
        if expert_dp_group is None and groups > 1:
            expert_dp_group = make([ranks_R[rank] for ranks_R in ranks_GR], "expert data parallel")
        planning = on_host(mine, "planning")
        first = rank // ranks_per_node * ranks_per_node
        neighbours, firsts = mine[first : first + ranks_per_node], [ranks_R[0] for ranks_R in ranks_GR]
        return cls(
            data=data or experts,
            experts=experts,
            expert_dp_group=expert_dp_group,
            weights=make(mine, "weights"),
            gradients=make(mine, "gradients"),
            control=control,
            expert_control=expert_control,
            node_control=expert_control if ranks_per_node == num_ranks else on_host(neighbours, "control"),
            leaders=on_host(firsts, "control") if rank == 0 and groups > 1 else None,
            planning=planning,
            planning_data=planning if groups == 1 else on_host(members, "planning"),
            rank=rank,
            num_ranks=num_ranks,
            ranks_per_node=ranks_per_node,
            group=group,
            groups=groups,
            positions=positions,
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

    @property
    def ranks_by_position(self) -> list[int]:
        """The global ranks of `experts`, in the order of the group that the framework gave."""
        ranks = dist.get_process_group_ranks(self.experts)
        return [ranks[rank] for rank in np.argsort(self.positions)]

    def initial_placement(self, num_layers: int, num_experts: int) -> Placement:
        """Homes: the i-th part of the experts is on the rank at position i.

        Raises:
            InputError: if the ranks don't divide the experts.
        """
        positions_LE = Placement.contiguous(num_layers, num_experts, self.num_ranks).home
        return Placement(np.argsort(self.positions).astype(np.int16)[positions_LE])


_in_use: WeakSet[Topology] = WeakSet()


@dataclass(frozen=True)
class _Membership:
    """The groups given to one rank, as global ranks in the order of the groups.

    Attributes:
        nodes: node of every rank of the expert-parallel group, numbered in order of first appearance.
        problem: the error of these arguments, if any.
    """

    expert_ranks: tuple[int, ...]
    dp_ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    problem: str | None


def _exchange(mine: _Membership, timeout: timedelta) -> dict[int, _Membership]:
    """The memberships of the ranks of this expert-parallel group, and of the expert-parallel groups of its `dp_ranks`.

    If groups line up, these are all data ranks. Whether groups line up has the same answer on all of their ranks,
    because groups that line up for one rank are complete. No further exchange is needed.
    """
    known = {dist.get_rank(): mine}
    for ranks in (mine.expert_ranks, mine.dp_ranks):
        if len(ranks) > 1:
            gathered: list[dict[int, _Membership]] = [{}] * len(ranks)
            control = group_of(ranks, "control", timeout=timeout, backend="gloo")
            dist.all_gather_object(gathered, known, group=control)
            known = {rank: membership for memberships in gathered for rank, membership in memberships.items()}
    return known


def _line_up(known: Mapping[int, _Membership]) -> list[tuple[int, ...]]:
    """Global ranks `[G][R]` by number of the expert-parallel group and position in it.

    Raises:
        InputError: on all ranks of the groups, if a rank has a problem or the groups don't line up.
    """
    me = dist.get_rank()
    for rank in (me, *sorted(known)):
        problem = known[rank].problem
        if problem is not None:
            raise InputError(problem if rank == me else f"rank {rank}: {problem}")
    columns = [known[rank].dp_ranks for rank in known[me].expert_ranks]
    rows = list(zip(*columns, strict=False))
    places = [(rank, row, column) for row in rows for rank, column in zip(row, columns, strict=True)]
    if len({len(column) for column in columns}) > 1 or not all(
        rank in known and (known[rank].expert_ranks, known[rank].dp_ranks) == (row, column)
        for rank, row, column in places
    ):
        raise InputError(
            "expert_group and expert_dp_group don't line up: the i-th ranks of the expert-data-parallel groups of an "
            "expert-parallel group should be an expert-parallel group, in the same order. Expert-parallel groups are "
            f"{_list({membership.expert_ranks for membership in known.values()})}, expert-data-parallel groups "
            f"{_list({membership.dp_ranks for membership in known.values()})}"
        )
    for rank, membership in sorted(known.items()):
        if membership.nodes != known[me].nodes:
            raise InputError(
                "nodes should have the same layout in all expert-parallel groups; numbered in order of first "
                f"appearance, they are {list(known[me].nodes)} on rank {me} and {list(membership.nodes)} on rank {rank}"
            )
    return rows


def _number_nodes(nodes: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Nodes numbered in order of first appearance.

    Raises:
        InputError: if they are not one integer for each rank, or have different numbers of ranks.
    """
    try:
        nodes_R = [operator.index(node) for node in nodes]
    except TypeError:
        raise InputError(f"nodes is {nodes!r}; it should be the node number of every rank of expert_group") from None
    if len(nodes_R) != num_ranks:
        raise InputError(f"nodes has {len(nodes_R)} node numbers; expert_group has {num_ranks} ranks")
    ranks_of = Counter(nodes_R)
    if len(set(ranks_of.values())) > 1:
        counts = ", ".join(f"{ranks} on node {node}" for node, ranks in ranks_of.items())
        raise InputError(f"all nodes should have equally many ranks of expert_group; nodes has {counts}")
    numbers = {node: number for number, node in enumerate(ranks_of)}
    return tuple(numbers[node] for node in nodes_R)


def _list(groups: set[tuple[int, ...]]) -> str:
    shown = [str(list(ranks)) for ranks in sorted(groups)[:8]]
    return ", ".join(shown) + (f" and {len(groups) - 8} more" if len(groups) > 8 else "")
