"""`MicroStep`: a context for the forwards of one micro-step; `BoundRoutes`: how its layers route their rows;
`RunningStep`: the planned step that it belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner import Schedule, StepPlan
from trimtab.runtime.layer.programs import Programs, UploadedPrograms
from trimtab.runtime.live.balancer import LiveMicroStep
from trimtab.runtime.planning.background_slices import StepSlices
from trimtab.runtime.planning.rank_load import RankLoad
from trimtab.runtime.program.physical_experts import InstanceReplicas, PhysicalExperts, PlannedRows, PlanReplicas
from trimtab.runtime.program.program import Program, place_rows
from trimtab.runtime.ranks.rank_calls import CallThread
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.streams import BackgroundCopies
from trimtab.runtime.transfer.transfers import Transfers
from trimtab.trace import RoutingTrace
from trimtab.trace.numbering import Numbering

# Most host memory of a rank for the programs of micro-steps, but for the present one and its neighbours.
KEPT_BYTES = 1 << 30


@dataclass(eq=False)
class BoundRoutes:
    """How the layers of a micro-step route their rows. Kept while it is open or a backward may follow.

    Rows are replayed as recorded if there are `programs`, and go to physical experts if there are `transfers`: to
    those of the plan if there are both, to those that are chosen after the router if there is no program.

    Attributes:
        micro_step: the micro-step.
        programs: recorded ids, with places if the plan is executed; None if rows go as the router chooses.
        transfers: replica transfers; None if rows go to the homes of experts.
        plan_number: the plan's number in the session.
        live: chooses the replicas of a balanced live micro-step; None otherwise.
        may_deviate: whether layers may be called with other ids than the recorded ones.
        routed: for each layer, address and version of the ids that its `route` returned last.
        record: stores the experts `[U, K]` that the router chose for tokens `[U]` in a layer.
        index: the micro-step's number in the step; -1 for a live one.
        positions: `[n]`, rows of the tokens in the forward, or None; see `MicroStep`.
        replays: whether rows are routed as recorded.
        is_balanced: whether rows go to physical experts.
        is_planned: whether the plan is executed.
    """

    micro_step: MicroStep
    programs: Programs | UploadedPrograms | None = None
    transfers: Transfers | None = None
    plan_number: int = 0
    live: LiveMicroStep | None = None
    may_deviate: bool = False
    routed: dict[int, tuple[int, int]] = field(default_factory=dict)
    record: Callable[[int, Array, Array], None] | None = None

    def __post_init__(self) -> None:
        # Read several times in each call of a layer.
        self.index, self.positions = self.micro_step.index, self.micro_step.positions
        self.replays, self.is_balanced = self.programs is not None, self.transfers is not None
        self.is_planned = self.replays and self.is_balanced

    def program(self, layer: int) -> Program | None:
        """The program of a layer; None if its rows are not known before the router has chosen."""
        return None if self.programs is None else self.programs.of(layer)

    def replay(self, layer: int, live_ids: torch.Tensor, counters: Counters | None) -> torch.Tensor:
        """`live_ids [T, K]` int64 with the recorded ids in their rows; see `ExpertLayer.route`.

        Args:
            counters: compare the two; None if nothing does.
        """
        program = self.program(layer)
        if program is None:
            return live_ids
        recorded = program.recorded_NK
        assert recorded is not None
        own_ids = live_ids if self.positions is None else live_ids.index_select(0, self.positions)
        if own_ids.shape != recorded.shape:
            raise RuntimeError(
                f"MoE layer {layer} got {len(own_ids)} tokens with {own_ids.shape[1]} experts each; the micro-step was "
                f"planned with {len(recorded)} tokens with {recorded.shape[1]}"
            )
        if counters is not None:
            counters.compare_routing(own_ids, recorded, program.read_N, program.num_read)
        if program.known_N is not None:
            recorded = torch.where(program.known_N[:, None], recorded, own_ids)
        elif self.positions is None:
            # The caller may write to its ids.
            return recorded.clone()
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
        """Bytes of its programs on the device."""
        used = [bound.programs for bound in self._bound.values()]
        return sum(programs.device_bytes for programs in used if isinstance(programs, UploadedPrograms))


@dataclass(eq=False)
class RunningStep:
    """An applied plan, and what this rank needs to run its micro-steps.

    Attributes:
        layers: home experts of all layers.
        plan: that of the expert-parallel group.
        load: rows of this rank and of the group.
        arriving_RMLH: see `RankLoad.for_homes`.
        trace: this rank's sequences, ordered by micro-step.
        schedule: the schedule of all data ranks; None if the session has not planned the step.
        transfers: replica transfers; None if micro-steps only replay their routing.
        number: the plan's number in the session.
        experts: the physical experts.
        uploads: copies programs to the device; None if that is the host.
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
    experts: PhysicalExperts
    uploads: BackgroundCopies | None = None
    slices: StepSlices | None = None
    unread_T: Array | None = None
    numbering: Numbering | None = None
    micro_steps: weakref.WeakValueDictionary[int, MicroStep] = field(default_factory=weakref.WeakValueDictionary)
    _completed: Array | None = None
    _programs: dict[tuple[int, bool, bool], Programs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replicas: PlanReplicas | StepSlices = self.slices or PlanReplicas(self.plan)
        # Of each micro-step; its tokens are consecutive, since sequences are ordered by micro-step.
        micro_step = self.plan.schedule.of_rank(self.topology.rank)
        self._sequences = np.searchsorted(micro_step, np.arange(self.plan.num_micro_steps + 1)).tolist()
        self._tokens = self.trace.sequence_starts[self._sequences].tolist()

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
        planned = self.trace.sequence_hashes[self._sequences[index] : self._sequences[index + 1]]
        return np.array_equal(sequence_hashes, planned)

    def bind(self, micro_step: MicroStep, has_slices: bool, may_deviate: bool) -> BoundRoutes:
        """Routes and programs of a micro-step with the planned sequences on all ranks. Not a collective.

        Args:
            has_slices: whether its replicas are planned and agreed; it has none otherwise.
            may_deviate: whether any rank may call layers with other ids than the recorded ones.
        """
        index = micro_step.index
        programs = self.programs_of(index, has_slices, may_deviate)
        used = programs if self.uploads is None else UploadedPrograms(programs, self.uploads)
        bound = BoundRoutes(micro_step, used, self.transfers, self.number, may_deviate=may_deviate)
        if self.transfers is not None:
            first_token = self._tokens_of(index).start
            bound.record = lambda layer, tokens_U, ids_UK: self._record(first_token + tokens_U, layer, ids_UK)
        return bound

    def programs_of(self, index: int, has_slices: bool, may_deviate: bool = False) -> Programs:
        """The programs of a micro-step, which are made when they are used; see `bind`."""
        key = index, has_slices, may_deviate
        programs = self._programs.get(key)
        if programs is None:
            # A further pass needs the first ones first.
            spare = [other for other in self._programs if abs(other[0] - index) > 1]
            while spare and sum(kept.nbytes for kept in self._programs.values()) > KEPT_BYTES:
                del self._programs[spare.pop()]
            pack_for = None if self.uploads is None else self.layers[0].device
            programs = self._programs[key] = Programs(partial(self._make, *key), len(self.layers), pack_for)
        return programs

    def drop_programs(self) -> None:
        """Free the host memory of all programs that no micro-step in use has. They know the step that makes them."""
        self._programs.clear()

    def start_programs(self, index: int, has_slices: bool, may_deviate: bool, thread: CallThread) -> None:
        """Make the programs of a micro-step on a thread, and then those of the next one, if its replicas are here."""
        started = [(index, has_slices, may_deviate)]
        if index + 1 < self.plan.num_micro_steps and (self.slices is None or self.slices.is_here(index + 1)):
            started.append((index + 1, True, may_deviate))
        for key in started:
            programs = self.programs_of(*key)
            if not programs.is_made:
                thread.start(programs.make_all)

    def _make(self, index: int, has_slices: bool, may_deviate: bool, layer: int) -> Program:
        """The program of one layer."""
        tokens = self._tokens_of(index)
        ids_NK = self.trace.expert_ids[tokens, layer]
        is_known_N = ids_NK[:, 0] != self.trace.no_route
        is_read_N = np.ones_like(is_known_N) if self.unread_T is None else ~self.unread_T[tokens]
        known_N, read_N = (None if mask_N.all() else torch.from_numpy(mask_N) for mask_N in (is_known_N, is_read_N))
        recorded_NK = torch.from_numpy(ids_NK.astype(np.int64))
        program = Program(recorded_NK, known_N, read_N, int((is_known_N & is_read_N).sum()))
        if self.transfers is None and not may_deviate:
            return program
        has_replicas = has_slices and self.transfers is not None
        planned = PlannedRows.of(
            recorded_NK.numpy(),
            self.load.counts_MLE[index, layer],
            self.arriving_RMLH[:, index, layer],
            self.experts,
            self.replicas.of(index, layer) if has_replicas else InstanceReplicas.none(self.plan.num_ranks),
        )
        planned.replicas.located(self.experts.places)
        if may_deviate or self.plan.mixed_ML[index, layer]:
            return replace(program, planned=planned)
        return replace(program, layout=place_rows(planned, has_places=self.layers[layer].sends_rows))

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
    def program_bytes(self) -> int:
        """Bytes of programs that layers read: those on the device, or on the host if nothing uploads them."""
        if self.uploads is None:
            return sum(programs.nbytes for programs in self._programs.values())
        return sum(micro_step.device_bytes for micro_step in self.micro_steps.values())

    def _record(self, tokens_U: Array, layer: int, ids_UK: Array) -> None:
        if self._completed is None:
            self._completed = self.trace.expert_ids.copy()
        self._completed[tokens_U, layer] = ids_UK

    def _tokens_of(self, index: int) -> slice:
        return slice(self._tokens[index], self._tokens[index + 1])
