"""`MicroStep`: a context for the forwards of one micro-step; `RunningStep`: the planned step that it belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.planner import Schedule, StepPlan, Workload
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.rows.instance_replicas import InstanceReplicas, PlanReplicas
from trimtab.runtime.rows.layout import Layout, place_rows, upload_layouts
from trimtab.runtime.rows.physical_experts import PhysicalExperts, PlannedRows
from trimtab.runtime.rows.step_slices import StepSlices
from trimtab.runtime.state.flat_memory import upload
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer.transfers import Transfers
from trimtab.trace import RoutingTrace


@dataclass(eq=False)
class BoundRoutes:
    """Routes and layouts of a micro-step, for its layers. Kept while the micro-step is open or a backward may follow.

    Attributes:
        micro_step: the micro-step.
        recorded_LNK: recorded ids `[L, n, K]` int64; None if there are none, or the batch is not the planned one.
        known: for each layer with unknown routes `[n]` bool, whether the route of each token is known.
        layouts: one for each layer if the micro-step is planned, else empty; None for layers with unknown rows on any
            rank.
        partial: the planned rows of layers with unknown routes.
        transfers: replica transfers; None if the plan is not executed.
        plan_number: the plan's number in the session.
        routed: for each layer, address and version of the ids that its `route` returned last.
        record: stores the experts `[U, K]` that the router chose for tokens `[U]` in a layer.
    """

    micro_step: MicroStep
    recorded_LNK: torch.Tensor | None = None
    known: Mapping[int, torch.Tensor] = field(default_factory=dict)
    layouts: Sequence[Layout | None] = ()
    partial: dict[int, PlannedRows] = field(default_factory=dict)
    transfers: Transfers | None = None
    plan_number: int = 0
    routed: dict[int, tuple[int, int]] = field(default_factory=dict)
    record: Callable[[int, Array, Array], None] | None = None

    @property
    def index(self) -> int:
        """The micro-step's number in the step; -1 for a live one."""
        return self.micro_step.index

    @property
    def positions(self) -> torch.Tensor | None:
        """`[n]`, rows of the tokens in the forward, or None; see `MicroStep`."""
        return self.micro_step.positions

    @property
    def replays(self) -> bool:
        """Whether the micro-step has recorded routing."""
        return self.recorded_LNK is not None

    def replay(self, layer: int, live_ids: torch.Tensor) -> torch.Tensor:
        """`live_ids [T, K]` int64 with the recorded ids in their rows; see `ExpertLayer.route`."""
        if self.recorded_LNK is None:
            return live_ids
        recorded = self.recorded_LNK[layer]
        chosen = live_ids if self.positions is None else live_ids.index_select(0, self.positions)
        if chosen.shape != recorded.shape:
            raise RuntimeError(
                f"MoE layer {layer} got {len(chosen)} tokens with {chosen.shape[1]} experts each; the micro-step was "
                f"planned with {len(recorded)} tokens with {recorded.shape[1]}"
            )
        if layer in self.known:
            recorded = torch.where(self.known[layer][:, None], recorded, chosen)
        return recorded.clone() if self.positions is None else live_ids.index_copy(0, self.positions, recorded)


class MicroStep:
    """One micro-step. Enter it around every forward of its tokens.

    Before its backward there may be any number of forwards, also without gradients, of pipeline chunks, and of other
    micro-steps, in any order. The backward needs no context. Routes are in device memory while the micro-step is open
    or a backward may follow.

    Attributes:
        index: its number in the step; -1 for a live one.
        positions: `[n]` int64, rows of this rank's tokens among those that layers are given; None for all rows.
    """

    def __init__(
        self,
        index: int,
        positions: torch.Tensor | None,
        bind: Callable[[MicroStep, bool, bool], BoundRoutes],
        run: Callable[[MicroStep], AbstractContextManager[None]],
    ) -> None:
        self.index = index
        self.positions = positions
        self._bind, self._run = bind, run
        self._bound: weakref.WeakValueDictionary[tuple[bool, bool], BoundRoutes] = weakref.WeakValueDictionary()
        self._open: AbstractContextManager[None] | None = None

    def __enter__(self) -> MicroStep:
        running = self._run(self)
        running.__enter__()
        self._open = running
        return self

    def __exit__(self, *error: object) -> None:
        running, self._open = self._open, None
        assert running is not None
        running.__exit__(*error)  # type: ignore[arg-type]

    def routes(self, matches_plan: bool, has_slices: bool) -> BoundRoutes:
        """Routes and layouts, computed again unless an earlier result is still in use. Not a collective.

        Args:
            matches_plan: whether all ranks have the planned tokens, as exchanged when the micro-step was entered.
            has_slices: whether the micro-step's replicas are planned and agreed.
        """
        key = matches_plan, has_slices
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self._bind(self, matches_plan, has_slices)
        return bound


@dataclass(eq=False)
class RunningStep:
    """An applied plan, and what this rank needs to run its micro-steps.

    Attributes:
        plan, workload: those of the expert-parallel group.
        trace: this rank's sequences, ordered by micro-step.
        schedule: the schedule of all data ranks; None if the session has not planned the step.
        transfers: replica transfers; None if micro-steps only replay their routing.
        number: the plan's number in the session.
        num_slots: slots of a rank.
        slices: replicas that follow while the step runs; None if the plan has all.
        micro_steps: micro-steps in use, by number.
        has_moved: whether experts have moved to other homes since the plan was applied.
    """

    plan: StepPlan
    workload: Workload
    trace: RoutingTrace
    schedule: Schedule | None
    transfers: Transfers | None
    number: int
    num_slots: int
    slices: StepSlices | None = None
    micro_steps: weakref.WeakValueDictionary[int, MicroStep] = field(default_factory=weakref.WeakValueDictionary)
    has_moved: bool = False
    _completed: Array | None = None

    def __post_init__(self) -> None:
        self.replicas: PlanReplicas | StepSlices = self.slices or PlanReplicas(self.plan)

    def problem(self, index: int) -> Exception | None:
        """The error of entering the micro-step of this number, or None."""
        if self.transfers is not None and self.has_moved:
            return RuntimeError("experts have moved since the plan was applied; plan the step again")
        if 0 <= index < self.plan.num_micro_steps:
            return None
        return IndexError(f"micro-step {index} of {self.plan.num_micro_steps}")

    def matches_plan(self, index: int, sequence_hashes: Array | None, rank: int) -> bool:
        """Whether these are the planned sequences of a rank; True without hashes."""
        if sequence_hashes is None:
            return True
        return np.array_equal(sequence_hashes, self.trace.sequence_hashes[self._sequences_of(index, rank)])

    def bind(
        self, micro_step: MicroStep, layers: Sequence[HomeExperts], topology: Topology, has_slices: bool
    ) -> BoundRoutes:
        """Routes and layouts of a micro-step with the planned sequences on all ranks. Not a collective.

        Args:
            has_slices: whether its replicas are planned and agreed; it has none otherwise.
        """
        index, device = micro_step.index, layers[0].device
        ids_NLK = self.trace.expert_ids[self._tokens_of(index, topology.rank)]
        is_known_NL = ids_NLK[:, :, 0] != self.trace.no_route
        (recorded_LNK,) = upload([ids_NLK.transpose(1, 0, 2).astype(np.int64)], device)
        incomplete = np.flatnonzero(~is_known_NL.all(axis=0)).tolist()
        known = upload([np.ascontiguousarray(is_known_NL[:, layer]) for layer in incomplete], device)
        bound = BoundRoutes(
            micro_step, recorded_LNK, dict(zip(incomplete, known, strict=True)), transfers=self.transfers,
            plan_number=self.number,
        )  # fmt: skip
        if self.transfers is None:
            return bound
        planned = [
            PlannedRows.of(
                np.ascontiguousarray(ids_NLK[:, layer.index]),
                self.workload.token_counts_MLRE[index, layer.index],
                PhysicalExperts.of(layer, topology.rank, topology.positions, self.num_slots),
                self.replicas.of(index, layer.index) if has_slices else InstanceReplicas.none(self.plan.num_ranks),
            )
            for layer in layers
        ]
        is_mixed_L = self.plan.mixed_ML[index]
        whole = [place_rows(rows) for rows, mixed in zip(planned, is_mixed_L, strict=True) if not mixed]
        uploaded = iter(upload_layouts(whole, device))
        bound.layouts = [None if mixed else next(uploaded) for mixed in is_mixed_L]
        bound.partial = {layer: planned[layer] for layer in np.flatnonzero(is_mixed_L).tolist()}
        first_token = self._tokens_of(index, topology.rank).start
        bound.record = lambda layer, tokens_U, ids_UK: self._record(first_token + tokens_U, layer, ids_UK)
        return bound

    def has_slices(self, index: int) -> bool:
        """Whether the replicas of a micro-step are planned and agreed."""
        return self.slices is None or self.slices.is_agreed(index)

    @property
    def whole_plan(self) -> StepPlan:
        """The plan with all replicas; waits for slices."""
        return self.plan if self.slices is None else self.slices.whole_plan()

    @property
    def completed_trace(self) -> RoutingTrace:
        """The trace with the routes that the router has chosen for unknown tokens since the plan was applied."""
        return self.trace if self._completed is None else replace(self.trace, expert_ids=self._completed)

    def _record(self, tokens_U: Array, layer: int, ids_UK: Array) -> None:
        if self._completed is None:
            self._completed = self.trace.expert_ids.copy()
        self._completed[tokens_U, layer] = ids_UK

    def _sequences_of(self, index: int, rank: int) -> Array:
        return np.flatnonzero(self.plan.schedule.of_rank(rank) == index)

    def _tokens_of(self, index: int, rank: int) -> slice:
        """The tokens of a micro-step; they are consecutive, since sequences are ordered by micro-step."""
        mine = self._sequences_of(index, rank)
        if not len(mine):
            return slice(0, 0)
        return slice(int(self.trace.sequence_starts[mine[0]]), int(self.trace.sequence_starts[mine[-1] + 1]))
