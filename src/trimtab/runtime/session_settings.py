"""`SessionSettings`: the arguments of a `Session`, each with its default and check, and whether ranks must share it."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cached_property, wraps
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar, get_args, get_type_hints

import torch.distributed as dist

import trimtab
from trimtab.cluster import ClusterSpec
from trimtab.cluster.specs import AUTO, RING_LAYERS, slot_numbers
from trimtab.errors import InputError
from trimtab.planner import PlanSettings
from trimtab.rank_variables import is_switched_off
from trimtab.runtime.live.balancer import LivePolicy
from trimtab.runtime.ranks.topology import Topology

Mode = Literal["plan", "static", "live", "shadow", "off"]
Paths = Literal["both", "peer", "host", "message"]
# Environment variable: 1 turns on `verify_weights` unless the argument is given.
VERIFY_WEIGHTS = "TRIMTAB_VERIFY_WEIGHTS"
# Marks settings that may differ between ranks.
OF_ONE_RANK = "of one rank"

Check = Callable[[str, Any], None]
"""`check(name, value)` raises InputError if the value is out of its range."""
P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def at_least(least: int) -> Check:
    """The check of an integer of at least `least`."""

    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name} is {value!r}; it should be a whole number of {least} or more")

    return check


def one_of(choices: Any) -> Check:
    """The check of one of the values of a `Literal`."""

    def check(name: str, value: Any) -> None:
        if value not in get_args(choices):
            raise InputError(f"{name} is {value!r}; it should be one of {', '.join(get_args(choices))}")

    return check


def finite(name: str, value: Any) -> None:
    """The check of a finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name} is {value!r}; it should be a finite number")


def slots(name: str, value: object) -> None:
    """The check of a number of slots, or "auto"."""
    if value != AUTO:
        at_least(0)(name, value)


@dataclass(frozen=True, eq=False, kw_only=True)
class SessionSettings:
    """The arguments of `Session`. Those that are not marked `OF_ONE_RANK` must be equal on all ranks.

    Args:
        num_experts: experts of a layer, E.
        mode: `plan` balances; `static` is expert parallelism without replicas on the planned path; `live` balances
            without recorded routing, see `live_micro_step`; `shadow` plans and reports, but runs as `off`; `off`
            replays routing in ordinary expert parallelism. `TRIMTAB_BALANCE=mode=off` in the environment makes it
            `off`.
        slots_per_rank: most replicas of one layer on a rank. `auto`: the fewest of 2, 4, 8 and 16 with which a step is
            predicted to take about as long as with any, of those that fit the device; chosen at the first plan, and on
            a GPU once more after the first step, whose memory is then known. In mode `live` 2.
        ring_layers: layers that replicas are kept for at the same time, one in use and the others prefetched.
        paths: sources of replicas' weights: home ranks (`peer`), host memory (`host`), or both; `message` is `peer`
            with messages also between GPUs of one node, which otherwise read each other's memory if they can.
        mirror_bytes: most host memory of a node for mirrored experts; unlimited by default.
        peer_memory_bytes: most memory of a GPU for copies of its experts that other ranks of the node read; if they
            need more, replicas are sent as messages on all ranks. By default a fifth of the GPU's memory.
        least_gain: a plan with a smaller predicted saving, as a fraction of the step, is not executed.
        max_rows_per_rank: rows, (token, expert) pairs, that no rank may exceed in any layer of a micro-step, in mode
            `plan`. A step that can't keep to it is refused when it is planned, with the smallest possible value.
            Micro-steps with other rows than planned are not limited; `moe/unplanned_micro_steps` counts them.
        exact: in mode `plan`, no rank gets more rows of a layer than the mean, rounded up, as static shapes need. A
            step that can't be spread so evenly is refused.
        rates: rates of compute and links, from which the planner computes costs, such as `trimtab calibrate` measures;
            by default those of an H100 cluster, or of a CPU machine. With rates, plans don't depend on measured times.
            Its numbers of ranks and slots are ignored.
        policy: in mode `live`, how replicas are chosen in `live_micro_step`: `quota`, replicas and split from the
            counts of the layer; `feplb`, whole experts that move within a node after the dispatch; `off`, none.
        verify_weights: compare sampled elements of every expert when a micro-step begins, to detect weight changes that
            address and version do not show. By default on in mode `shadow` and if `TRIMTAB_VERIFY_WEIGHTS=1` is set. On
            CUDA the host then waits for the device.
        group: the data ranks; all ranks by default.
        groups: number of expert-parallel groups, each of neighbouring data ranks that together hold all experts.
        ranks_per_node: neighbouring ranks that share a node; all ranks of a group by default.
        expert_group: a framework's process group of any ranks that together hold all experts; instead of `group`,
            `groups` and `ranks_per_node`. The rank at position i of R in it is home to experts i * E / R up to
            (i + 1) * E / R. Creating the session is then a collective over the ranks of all
            expert-parallel groups that `expert_dp_group` joins: the data ranks.
        expert_dp_group: with `expert_group`, the process group of the ranks that hold the same experts as this one. A
            rank's position in it is the number of its expert-parallel group. None for one expert-parallel group.
        nodes: with `expert_group`, the node number of each of its ranks, in its order; one node by default.
        timeout: most time for which a rank waits for others; by default that of `group`, but at most 10 minutes.

    Raises:
        InputError: if a value is out of its range.
    """

    num_experts: Annotated[int, at_least(1)]
    mode: Annotated[Mode, one_of(Mode)] = "plan"
    slots_per_rank: Annotated[int | str, slots] = AUTO
    ring_layers: Annotated[int, at_least(2)] = RING_LAYERS
    paths: Annotated[Paths, one_of(Paths)] = "both"
    mirror_bytes: Annotated[int | None, at_least(0)] = None
    peer_memory_bytes: Annotated[int | None, at_least(0)] = None
    least_gain: Annotated[float, finite] = 0.005
    max_rows_per_rank: Annotated[int | None, at_least(1)] = None
    exact: bool = False
    rates: ClusterSpec | None = None
    policy: Annotated[LivePolicy, one_of(LivePolicy)] = "quota"
    verify_weights: Annotated[bool | None, OF_ONE_RANK] = None
    group: Annotated[dist.ProcessGroup | None, OF_ONE_RANK] = None
    groups: Annotated[int, OF_ONE_RANK, at_least(1)] = 1
    ranks_per_node: Annotated[int | None, OF_ONE_RANK] = None
    expert_group: Annotated[dist.ProcessGroup | None, OF_ONE_RANK] = None
    expert_dp_group: Annotated[dist.ProcessGroup | None, OF_ONE_RANK] = None
    nodes: Annotated[Sequence[int] | None, OF_ONE_RANK] = None
    timeout: Annotated[timedelta | None, OF_ONE_RANK] = None

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            for check in filter(callable, _marks(setting.name)):
                if value is not None or setting.default is not None:
                    check(setting.name, value)
        if is_switched_off():
            # Limits of plans would be checked without one.
            for name, value in {"mode": "off", "exact": False, "max_rows_per_rank": None}.items():
                object.__setattr__(self, name, value)
        if self.verify_weights is None:
            is_on = self.mode == "shadow" or os.environ.get(VERIFY_WEIGHTS) == "1"
            object.__setattr__(self, "verify_weights", is_on)

    @cached_property
    def shared(self) -> dict[str, object]:
        """The version of Trimtab and the settings that must be equal on all ranks, by name."""
        compared = [setting.name for setting in fields(self) if OF_ONE_RANK not in _marks(setting.name)]
        return {"version of Trimtab": trimtab.__version__} | {name: getattr(self, name) for name in compared}

    @property
    def slot_numbers(self) -> tuple[int, ...]:
        """The numbers of slots to choose from, ascending; one if it is given."""
        return slot_numbers(self.slots_per_rank)

    @property
    def executes_plans(self) -> bool:
        """Whether plans are executed, not only reported."""
        return self.mode in ("plan", "static")

    @property
    def slices_plans(self) -> bool:
        """Whether replicas may be planned while the step runs."""
        return self.mode == "plan" and self.max_rows_per_rank is None and not self.exact

    def patience_s(self, seconds: float) -> float | None:
        """Most seconds to wait for what is planned on a thread, before going on without it.

        None with given `rates`: the same run then makes the same plans, however busy the machine is. The thread ends
        with the plan, or with the exchange of a rank that has ended.
        """
        return seconds if self.rates is None else None

    @cached_property
    def plan_settings(self) -> PlanSettings:
        """The planner's settings."""
        return PlanSettings(least_gain=self.least_gain, max_rows_per_rank=self.max_rows_per_rank, exact=self.exact)

    def topology(self) -> Topology:
        """The process groups, some of which are created. Collective.

        Raises:
            InputError: if arguments exclude each other, or don't fit; see `Topology`.
        """
        if self.expert_group is None:
            if self.expert_dp_group is not None or self.nodes is not None:
                raise InputError(
                    "expert_dp_group and nodes go with expert_group; for groups that the session creates, use groups "
                    "and ranks_per_node"
                )
            return Topology.build(self.group, self.groups, self.ranks_per_node, self.timeout)
        if self.group is not None or self.groups != 1 or self.ranks_per_node is not None:
            raise InputError(
                "group, groups and ranks_per_node are for groups that the session creates; with expert_group, use "
                "expert_dp_group for several expert-parallel groups and nodes for several nodes"
            )
        return Topology.given(self.expert_group, self.expert_dp_group, self.nodes, self.timeout)


_HINTS = get_type_hints(SessionSettings, include_extras=True)


def _marks(name: str) -> tuple[Any, ...]:
    """The checks of a setting, and whether it is of one rank."""
    return getattr(_HINTS[name], "__metadata__", ())


def takes_arguments_of(
    settings: Callable[P, T],
) -> Callable[[Callable[[S, T], None]], Callable[Concatenate[S, P], None]]:
    """Decorates an `__init__(self, settings)`, which then takes the arguments of the settings, with their
    documentation."""

    def decorate(init: Callable[[S, T], None]) -> Callable[Concatenate[S, P], None]:
        @wraps(init)
        def with_arguments(self: S, /, *args: P.args, **named: P.kwargs) -> None:
            init(self, settings(*args, **named))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.signature(settings)
        vars(with_arguments)["__signature__"] = signature.replace(parameters=[own, *signature.parameters.values()])
        with_arguments.__doc__ = settings.__doc__
        return with_arguments

    return decorate
