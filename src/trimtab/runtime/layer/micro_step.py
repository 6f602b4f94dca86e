"""`MicroStep`: a context for the forwards of one micro-step; `BoundRoutes`: how its layers route their rows;
`RunningStep`: the planned step that it belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner import Schedule, StepPlan
from trimtab.runtime.live.balancer import LiveMicroStep
from trimtab.runtime.ranks.rank_calls import CallThread
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.rows.background_slices import StepSlices
from trimtab.runtime.rows.layout import place_rows
from trimtab.runtime.rows.physical_experts import InstanceReplicas, PhysicalExperts, PlannedRows, PlanReplicas
from trimtab.runtime.rows.rank_load import RankLoad
from trimtab.runtime.rows.row_tables import LayerTables, RowTables, moved
from trimtab.runtime.state.flat_memory import carve
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.streams import BackgroundCopies, Wait
from trimtab.runtime.transfer.transfers import Transfers
from trimtab.trace import RoutingTrace
from trimtab.trace.numbering import Numbering

# Most host memory of a rank for the tables of micro-steps, but for the present one and its neighbours.
KEPT_BYTES = 1 << 30


class DeviceTables:
    """The tables of one micro-step, for one use of it.

    Args:
        tables: those on the host.
        copies: uploads them; None if layers read them on the host.
    """

    def __init__(self, tables: RowTables, copies: BackgroundCopies | None) -> None:
        self._tables, self._copies = tables, copies
        # By chunk, tables on the device; and the waits for their uploads, until something has waited.
        self._uploaded: dict[int, list[LayerTables]] = {}
        self._waits: dict[int, Wait] = {}

    def of(self, layer: int) -> LayerTables:
        """The tables of a layer. Compute that is queued from now on waits for their upload."""
        if self._copies is None:
            return self._tables.of(layer)
        number, chunks = self._tables.number_of(layer), self._tables.chunks
        self._upload(number, self._copies)
        for other, chunk in enumerate(chunks):
            if chunk.is_made:
                self._upload(other, self._copies)
        if number in self._waits:
            self._waits.pop(number)()
        return self._uploaded[number][layer - chunks[number].layers.start]

    @property
    def device_bytes(self) -> int:
        """Bytes of the uploaded tables."""
        return sum(table.nbytes for tables in self._uploaded.values() for table in tables)

    def _upload(self, number: int, copies: BackgroundCopies) -> None:
        if number in self._uploaded:
            return
        host, packed = self._tables.of_chunk(number), self._tables.chunks[number].packed
        with torch.inference_mode(False):
            memories, self._waits[number] = copies.upload([part.memory for part in packed])
            arrays = [carve(memory, part.like) for memory, part in zip(memories, packed, strict=True)]
        self._uploaded[number] = moved(host, arrays)


class Routing(Enum):
    """How the rows of a micro-step are routed."""

    LIVE = "as the router chooses, without a plan"
    BALANCED = "as the router chooses, with replicas that are chosen after it"
    UNPLANNED = "as the router chooses, since the rows of a rank are not the planned ones"
    REPLAYED = "as recorded, to the homes of experts; the plan is not executed"
    PLANNED = "as recorded, to the copies of experts that the plan chooses"


@dataclass(eq=False)
class BoundRoutes:
    """Routes and layouts of a micro-step, for its layers. Kept while the micro-step is open or a backward may follow.

    Attributes:
        micro_step: the micro-step.
        routing: how its rows are routed.
        tables: recorded ids if it is `REPLAYED` or `PLANNED`, with layouts if `PLANNED`; None otherwise.
        transfers: replica transfers if it is `BALANCED` or `PLANNED`; None otherwise.
        plan_number: the plan's number in the session.
        live: chooses the replicas if it is `BALANCED`; None otherwise.
        may_deviate: whether layers may be called with other ids than the recorded ones.
        routed: for each layer, address and version of the ids that its `route` returned last.
        record: stores the experts `[U, K]` that the router chose for tokens `[U]` in a layer.
    """

    micro_step: MicroStep
    routing: Routing
    tables: DeviceTables | None = None
    transfers: Transfers | None = None
    plan_number: int = 0
    live: LiveMicroStep | None = None
    may_deviate: bool = False
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
        """Whether rows are routed as recorded."""
        return self.routing in (Routing.REPLAYED, Routing.PLANNED)

    @property
    def is_planned(self) -> bool:
        """Whether the plan is executed."""
        return self.routing is Routing.PLANNED

    @property
    def is_balanced(self) -> bool:
        """Whether rows go to physical experts: those of the plan, or of a balanced live micro-step."""
        return self.routing in (Routing.PLANNED, Routing.BALANCED)

    def tables_of(self, layer: int) -> LayerTables:
        """The tables of a layer of a micro-step with recorded routing."""
        assert self.tables is not None
        return self.tables.of(layer)

    def replay(self, layer: int, live_ids: torch.Tensor, counters: Counters | None) -> torch.Tensor:
        """`live_ids [T, K]` int64 with the recorded ids in their rows; see `ExpertLayer.route`.

        Args:
            counters: compare the two; None if nothing does.
        """
        if not self.replays:
            return live_ids
        tables = self.tables_of(layer)
        recorded = tables.recorded_NK.to(torch.int64)
        own_ids = live_ids if self.positions is None else live_ids.index_select(0, self.positions)
        if own_ids.shape != recorded.shape:
            raise RuntimeError(
                f"MoE layer {layer} got {len(own_ids)} tokens with {own_ids.shape[1]} experts each; the micro-step was "
                f"planned with {len(recorded)} tokens with {recorded.shape[1]}"
            )
        if counters is not None:
            counters.compare_routing(own_ids, recorded, tables.read_N, tables.num_read)
        if tables.known_N is not None:
            recorded = torch.where(tables.known_N[:, None], recorded, own_ids)
        return recorded if self.positions is None else live_ids.index_copy(0, self.positions, recorded)


class MicroStep:
    """One micro-step. Enter it around every forward of its tokens.

    Before its backward there may be any number of forwards, also without gradients, of pipeline chunks, and of other
    micro-steps, in any order. The backward needs no context. Routes are in device memory while the micro-step is open
    or a backward may follow.

    Attributes:
        index: its number in the step; -1 for a live one.
        positions: `[n]` int64, rows of this rank's tokens among those that layers are given; None for all rows.
        may_deviate: whether this rank may call layers with other ids than the recorded ones.
        forwards: hashes of the rows of forwards whose counts were exchanged, with their layers.
    """

    def __init__(
        self,
        index: int,
        positions: torch.Tensor | None,
        bind: Callable[[MicroStep, bool, bool, bool], BoundRoutes],
        run: Callable[[MicroStep], AbstractContextManager[None]],
        *,
        may_deviate: bool = False,
    ) -> None:
        self.index = index
        self.positions = positions
        self.may_deviate = may_deviate
        self.forwards: set[tuple[int, int]] = set()
        self._bind, self._run = bind, run
        self._bound: weakref.WeakValueDictionary[tuple[bool, bool, bool], BoundRoutes] = weakref.WeakValueDictionary()
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

    def routes(self, matches_plan: bool, has_slices: bool, may_deviate: bool = False) -> BoundRoutes:
        """Routes and layouts, computed again unless an earlier result is still in use. Not a collective.

        Args:
            matches_plan: whether all ranks have the planned tokens, as exchanged when the micro-step was entered.
            has_slices: whether the micro-step's replicas are planned and agreed.
            may_deviate: whether any rank may call layers with other ids than the recorded ones.
        """
        key = matches_plan, has_slices, may_deviate
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self._bind(self, *key)
        return bound

    @property
    def device_bytes(self) -> int:
        """Bytes of its tables on the device."""
        return sum(bound.tables.device_bytes for bound in self._bound.values() if bound.tables is not None)


@dataclass(eq=False)
class RunningStep:
    """An applied plan, and what this rank needs to run its micro-steps.

    Attributes:
        layers: home experts of all layers.
        plan: that of the expert-parallel group.
        load: rows of this rank and of the group.
        arriving_RMLH: `[R, M, L, E / R]` int32, known rows of every rank for this rank's home experts, in ascending
            order.
        trace: this rank's sequences, ordered by micro-step.
        schedule: the schedule of all data ranks; None if the session has not planned the step.
        transfers: replica transfers; None if micro-steps only replay their routing.
        number: the plan's number in the session.
        num_slots: slots of a rank.
        uploads: copies tables of rows to the device; None if that is the host.
        slices: replicas that follow while the step runs; None if the plan has all.
        unread_T: `[T]` bool, this rank's tokens whose output is not used; None if all are used.
        numbering: of the session when it planned the step.
        micro_steps: micro-steps in use, by number.
    """

    topology: Topology
    layers: Sequence[HomeExperts]
    plan: StepPlan
    load: RankLoad
    arriving_RMLH: Array
    trace: RoutingTrace
    schedule: Schedule | None
    transfers: Transfers | None
    number: int
    num_slots: int
    uploads: BackgroundCopies | None = None
    slices: StepSlices | None = None
    unread_T: Array | None = None
    numbering: Numbering | None = None
    micro_steps: weakref.WeakValueDictionary[int, MicroStep] = field(default_factory=weakref.WeakValueDictionary)
    _completed: Array | None = None
    _tables: dict[tuple[int, bool, bool], RowTables] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replicas: PlanReplicas | StepSlices = self.slices or PlanReplicas(self.plan)

    def problem(self, index: int) -> Exception | None:
        """The error of entering the micro-step of this number, or None."""
        if isinstance(index, int | np.integer) and 0 <= index < self.plan.num_micro_steps:
            return None
        return InputError(
            f"micro-step {index!r} is not in the plan; its {self.plan.num_micro_steps} micro-steps are numbered from 0"
        )

    def matches_plan(self, index: int, sequence_hashes: Array | None) -> bool:
        """Whether these are the planned sequences of this rank; True without hashes."""
        if sequence_hashes is None:
            return True
        return np.array_equal(sequence_hashes, self.trace.sequence_hashes[self._sequences_of(index)])

    def bind(self, micro_step: MicroStep, has_slices: bool, may_deviate: bool) -> BoundRoutes:
        """Routes and layouts of a micro-step with the planned sequences on all ranks. Not a collective.

        Args:
            has_slices: whether its replicas are planned and agreed; it has none otherwise.
            may_deviate: whether any rank may call layers with other ids than the recorded ones.
        """
        index = micro_step.index
        bound = BoundRoutes(
            micro_step,
            Routing.REPLAYED if self.transfers is None else Routing.PLANNED,
            DeviceTables(self.tables_of(index, has_slices, may_deviate), self.uploads),
            self.transfers,
            self.number,
            may_deviate=may_deviate,
        )
        if self.transfers is not None:
            first_token = self._tokens_of(index).start
            bound.record = lambda layer, tokens_U, ids_UK: self._record(first_token + tokens_U, layer, ids_UK)
        return bound

    def tables_of(self, index: int, has_slices: bool, may_deviate: bool = False) -> RowTables:
        """The tables of a micro-step, which are made when they are used; see `bind`."""
        key = index, has_slices, may_deviate
        tables = self._tables.get(key)
        if tables is None:
            tables = self._tables[key] = self.new_tables(*key)
        # A further pass needs the first ones first.
        spare = [other for other in self._tables if abs(other[0] - index) > 1]
        while spare and sum(kept.nbytes for kept in self._tables.values()) > KEPT_BYTES:
            del self._tables[spare.pop()]
        return tables

    def new_tables(self, index: int, has_slices: bool, may_deviate: bool = False) -> RowTables:
        """Tables of a micro-step that nothing else uses."""
        pack_for = None if self.uploads is None else self.layers[0].device
        return RowTables(partial(self._make_tables, index, has_slices, may_deviate), len(self.layers), pack_for)

    def drop_tables(self) -> None:
        """Free the host memory of all tables that no micro-step in use has. They know the step that makes them."""
        self._tables.clear()

    def start_tables(self, index: int, has_slices: bool, may_deviate: bool, thread: CallThread) -> None:
        """Make the tables of a micro-step on a thread, and then those of the next one, if its replicas are here."""
        started = [(index, has_slices, may_deviate)]
        if index + 1 < self.plan.num_micro_steps and (self.slices is None or self.slices.is_here(index + 1)):
            started.append((index + 1, True, may_deviate))
        for key in started:
            tables = self.tables_of(*key)
            if not tables.is_made:
                thread.start(tables.make_all)

    def _make_tables(self, index: int, has_slices: bool, may_deviate: bool, layer: int) -> LayerTables:
        topology, tokens = self.topology, self._tokens_of(index)
        ids_NK = self.trace.expert_ids[tokens, layer].copy()
        is_known_N = ids_NK[:, 0] != self.trace.no_route
        is_read_N = np.ones_like(is_known_N) if self.unread_T is None else ~self.unread_T[tokens]
        known_N, read_N = (None if mask_N.all() else torch.from_numpy(mask_N) for mask_N in (is_known_N, is_read_N))
        tables = LayerTables(torch.from_numpy(ids_NK), known_N, read_N, int((is_known_N & is_read_N).sum()))
        if self.transfers is None and not may_deviate:
            return tables
        has_replicas = has_slices and self.transfers is not None
        planned = PlannedRows.of(
            ids_NK,
            self.load.counts_MLE[index, layer],
            self.arriving_RMLH[:, index, layer],
            PhysicalExperts.of(self.layers[layer], topology.rank, topology.positions, self.num_slots),
            self.replicas.of(index, layer) if has_replicas else InstanceReplicas.none(self.plan.num_ranks),
        )
        if may_deviate or self.plan.mixed_ML[index, layer]:
            return replace(tables, partial=planned)
        return replace(tables, layout=place_rows(planned, has_places=self.layers[layer].sends_rows))

    def tokens_to_match(self, index: int) -> dict[str, object]:
        """This rank's tokens in a micro-step, by a name for errors, if a dispatcher needs the same on all ranks."""
        name = self.layers[0].equal_tokens
        mine = self._tokens_of(index) if name else slice(0, 0)
        return {f"tokens of a rank in a micro-step, as {name} needs them": mine.stop - mine.start} if name else {}

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

    @property
    def table_bytes(self) -> int:
        """Bytes of row tables that layers read: those on the device, or on the host if nothing uploads them."""
        if self.uploads is None:
            return sum(tables.nbytes for tables in self._tables.values())
        return sum(micro_step.device_bytes for micro_step in self.micro_steps.values())

    def _record(self, tokens_U: Array, layer: int, ids_UK: Array) -> None:
        if self._completed is None:
            self._completed = self.trace.expert_ids.copy()
        self._completed[tokens_U, layer] = ids_UK

    def _sequences_of(self, index: int) -> Array:
        return np.flatnonzero(self.plan.schedule.of_rank(self.topology.rank) == index)

    def _tokens_of(self, index: int) -> slice:
        """The tokens of a micro-step; they are consecutive, since sequences are ordered by micro-step."""
        mine = self._sequences_of(index)
        if not len(mine):
            return slice(0, 0)
        return slice(int(self.trace.sequence_starts[mine[0]]), int(self.trace.sequence_starts[mine[-1] + 1]))
