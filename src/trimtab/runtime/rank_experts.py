"""`RankExperts`: the home experts of all layers on this rank, their optimizers, their copies,
and `MovePrice`: what an expert costs that changes its rank, as measured in past renumberings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner import Placement
from trimtab.runtime.autograd.gradient_watch import Accumulation, GradientWatch
from trimtab.runtime.autograd.torch_engine import call_after_backward
from trimtab.runtime.layer.backward import Backward
from trimtab.runtime.plan_report import RankMemory
from trimtab.runtime.ranks.lockstep import STEP, Lockstep
from trimtab.runtime.ranks.recorder import REFRESHING
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.session_settings import SessionSettings
from trimtab.runtime.state.expert_places import ExpertPlaces
from trimtab.runtime.state.home_experts import HomeExperts, ReadParameters, read_tensors
from trimtab.runtime.state.moving import check_movable, expert_state_bytes, move_experts, state_to_move
from trimtab.runtime.state.optimizer_rows import ExpertState
from trimtab.runtime.state.owners import follow_owners, note_owners
from trimtab.runtime.state.parameter_checks import check_compute_dtype, check_new_parameters
from trimtab.runtime.state.renumbering import permute
from trimtab.runtime.state.weight_watch import OptimizerWatch
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.transfers import Transfers

# Of a device's memory: that may be used in all, and that slots get before a step has shown what it needs.
USED_PART, FIRST_PART = 0.95, 0.05


class RankExperts:
    """Home experts of all layers, the optimizers that train them, and the copies of the experts.

    Attributes:
        layers: the home experts of each layer.
        backward: tracks backwards, to complete gradients when they end.
        accumulation: detects gradients that were already summed.
        gradients: detects gradients that others change.
        optimizers: hooks of optimizer steps.
        changed: whether weights are known to have changed since copies were made.
        at_backward_end: called when a backward has ended.
        framework_state: what a framework's optimizers keep of the experts; None if torch's train them.
    """

    def __init__(self, settings: SessionSettings, topology: Topology, lockstep: Lockstep, counters: Counters) -> None:
        note_owners()
        self._settings, self._topology = settings, topology
        self._lockstep, self._counters = lockstep, counters
        self._transfers: Transfers | None = None
        self._move_price = MovePrice(topology)
        self.framework_state: ExpertState | None = None
        self.layers: list[HomeExperts] = []
        self.backward = Backward(self._complete_gradients, self._drop_gradients)
        self.accumulation = Accumulation(lambda: [p for p in self.parameters() if p.requires_grad])
        self.gradients = GradientWatch()
        self.optimizers = OptimizerWatch(self._own_layers, self._before_step, self._after_step)
        self.changed = True
        self.at_backward_end: Callable[[], None] = lambda: None

    @property
    def placement(self) -> Placement:
        """The homes of all experts."""
        return Placement(np.stack([layer.places.home_E for layer in self.layers]))

    @property
    def shape(self) -> tuple[int, int]:
        """Layers, and experts of a layer."""
        return len(self.layers), self._settings.num_experts

    @property
    def device(self) -> torch.device:
        """The device of the experts."""
        return self.layers[0].device

    def slot_bytes(self, settings: SessionSettings) -> int:
        """Bytes of a slot in all layers of the ring, with the gradients that a home may get for each."""
        first, layers = self.layers[0], settings.ring_layers
        arriving = 1 if first.joins_in_backward else layers
        gradient = sum(shape.numel() for shape in first.expert_shapes) * first.gradient_dtype.itemsize
        return layers * first.expert_bytes + arriving * gradient

    def most_slots(self, settings: SessionSettings) -> int:
        """The most slots that fit the device beside all else, by the largest memory so far; before a step has run, in a
        small part of the device."""
        most = settings.slot_numbers[-1]
        if self.device.type != "cuda" or len(settings.slot_numbers) == 1:
            return most
        total = torch.cuda.get_device_properties(self.device).total_memory
        has = 0 if self._transfers is None else self._transfers.ring.nbytes
        if has:
            room = USED_PART * total - torch.cuda.max_memory_reserved(self.device) + has
        else:
            room = min(FIRST_PART * total, USED_PART * total - torch.cuda.memory_reserved(self.device))
        return max(0, min(most, int(room // self.slot_bytes(settings))))

    @property
    def transfers(self) -> Transfers:
        """Replica transfers; created on first use, when all layers have been added."""
        if self._transfers is None:
            # Their memory is used in training, too.
            with torch.inference_mode(False):
                self._transfers = Transfers(
                    self._topology, self.layers, ring_layers=self._settings.ring_layers, counters=self._counters,
                    verify_weights=bool(self._settings.verify_weights), mirror_bytes=self._settings.mirror_bytes,
                    peer_memory_bytes=self._settings.peer_memory_bytes,
                )  # fmt: skip
        return self._transfers

    def add_layer(
        self,
        read: ReadParameters,
        home_E: Array,
        *,
        compute_dtype: torch.dtype | None = None,
        joins_in_backward: bool,
        refresh: Callable[[], None] | None = None,
    ) -> HomeExperts:
        """Add the home experts of the next layer; the arguments are those of `HomeExperts`. Raises InputError if the
        tensors don't fit the homes, or the layers before."""
        index, rank = len(self.layers), self._topology.rank
        tensors = read_tensors(read)
        check_new_parameters(index, tensors, self.layers, np.flatnonzero(home_E == rank))
        check_compute_dtype(index, tensors, compute_dtype)
        homes = HomeExperts(
            index, read, rank=rank, home_E=home_E, compute_dtype=compute_dtype, joins_in_backward=joins_in_backward,
            refresh=refresh,
        )  # fmt: skip
        if self.layers and homes.expert_like != self.layers[0].expert_like:
            raise InputError(
                f"MoE layer {index} has experts of {homes.expert_like}, layer 0 {self.layers[0].expert_like}. "
                "All layers share slots, so their experts should have equal shapes"
            )
        self.layers.append(homes)
        if not joins_in_backward:
            follow_owners(homes.parameters)
        return homes

    def _own_layers(self) -> list[HomeExperts]:
        """The layers whose gradients accumulate in `.grad`."""
        return [layer for layer in self.layers if not layer.joins_in_backward]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters whose gradients accumulate in `.grad`."""
        return [p for layer in self._own_layers() for p in layer.parameters]

    def need_own(self, purpose: str) -> None:
        """Raises InputError if the framework trains the experts of a layer."""
        if any(layer.joins_in_backward for layer in self.layers):
            raise InputError(
                f"the session can't {purpose}: its experts belong to the framework that trains them (FSDP, "
                "Megatron); use the framework's functions, in Megatron those of MegatronSession (register_optimizer)"
            )

    @property
    def state(self) -> ExpertState:
        """What is renumbered with the experts."""
        return self.framework_state or ExpertState(self.optimizers.registered)

    @property
    def knows_optimizers(self) -> bool:
        """Whether it is known which optimizers train the experts."""
        return self.framework_state is not None or bool(self.optimizers.registered)

    def check_move(self, places_L: Sequence[ExpertPlaces]) -> None:
        """Check that rows can go to these places. Raises InputError, or RuntimeError if gradients would be lost."""
        moved = [layer for layer in self.layers if layer.places.moved(places_L[layer.index]).size]
        if moved and self.framework_state is None:
            self.need_own("renumber them")
            self.optimizers.check_registered(moved)
        check_movable(self.layers, places_L, self.state)

    @property
    def move_s_per_expert(self) -> float | None:
        """Seconds to bring one expert to another rank with its present optimizer state, as measured when the session
        renumbered before; None if it has not."""
        s_per_byte = self._move_price.s_per_byte
        if s_per_byte is None:
            return None
        try:
            return s_per_byte * expert_state_bytes(self.layers[0], self.state)
        except InputError:  # State that can't be exchanged is reported by the renumbering.
            return None

    def state_to_move(self, places_L: Sequence[ExpertPlaces]) -> dict[str, object]:
        """State that must be equal on all ranks before a renumbering. Call it after `check_move`."""
        return state_to_move(self.layers, places_L, self.state)

    def renumber(
        self, places_L: Sequence[ExpertPlaces], order_LE: Array, others_L: Sequence[list[torch.Tensor]]
    ) -> None:
        """Exchange the rows of experts so that each is where its new id is. Collective, after `check_move` on all
        ranks.

        Args:
            places_L: where rows go, see `places_after`.
            others_L: for each layer, what is indexed by expert beside them.
        """
        self.drain()
        if any(layer.places.moved(after).size for layer, after in zip(self.layers, places_L, strict=True)):
            sent_R = self._move_price.measure(
                lambda: move_experts(self.layers, places_L, self.state, self._topology),
                self.device,
            )
            self._counters.moved_bytes += int(sent_R[self._topology.rank])
        for order_E, others in zip(order_LE, others_L, strict=True):
            permute(others, order_E)
        self.state.permute_others(self.layers, order_LE)
        self.changed = True

    def refresh(self) -> None:
        """Copy the present weights to staging memory, mirrors and symmetric memory. Collective."""
        start = time.perf_counter()
        with self._counters.recorded(REFRESHING), torch.inference_mode(False):
            self.transfers.refresh()
        self._counters.refresh_s += time.perf_counter() - start
        self.changed = False

    @property
    def are_copies(self) -> bool:
        """Whether experts are copies, which all data ranks bring up to date together."""
        return any(layer.refresh is not None for layer in self.layers)

    def drain(self) -> None:
        """Wait for all replica transfers and drop all replicas."""
        self._with_transfers(lambda transfers: transfers.ring.drain())

    def take_cpu_s(self) -> float:
        """Seconds of CPU time of the copying threads since the last call."""
        return 0.0 if self._transfers is None else self._transfers.ring.take_cpu_s()

    @property
    def peer_memory_bytes(self) -> int:
        """See `Transfers`."""
        return 0 if self._transfers is None else self._transfers.peer_memory_bytes

    def memory(self, table_bytes: int) -> RankMemory:
        """Memory of this rank now, by owner; `table_bytes` is that of programs."""
        return RankMemory.of(self.layers, self._transfers, table_bytes)

    def close(self) -> None:
        """Release threads and memory. What is used again is created again."""
        self._with_transfers(lambda transfers: transfers.close())
        self._transfers, self.changed = None, True
        for layer in self.layers:
            layer.drop_staging()

    def _with_transfers(self, call: Callable[[Transfers], None]) -> None:
        if self._transfers is not None:
            call(self._transfers)

    def _before_step(self, holds_experts: bool) -> None:
        try:
            self._with_transfers(lambda transfers: transfers.ring.complete())
        except RuntimeError:
            # Transfers of a session that is not used any more, perhaps; otherwise their use raises.
            if holds_experts:
                raise
        if not holds_experts:
            return
        if self._topology.groups > 1 and self.accumulation.is_open:
            raise RuntimeError(
                "an optimizer steps while gradients of experts are not summed over expert-parallel groups; call "
                "finish_gradients() first"
            )
        # A rank that skips a step, as a gradient scaler may, is detected at the next comparison of logs.
        self._lockstep.log(STEP)

    def _after_step(self, held: Sequence[HomeExperts], is_registered: bool) -> None:
        self.changed = True
        if self._transfers is not None:
            self._transfers.watch.steps += bool(held) or is_registered

    def _complete_gradients(self) -> None:
        """At the end of a backward: add the replica gradients that are in transfer."""
        if problem := self.gradients.missing():
            self._drop_gradients()
            raise problem
        with self._lockstep.comparing_on_error():
            self._with_transfers(lambda transfers: transfers.returns.finish())
        self.gradients.leave()
        # After the callbacks that others have queued meanwhile.
        call_after_backward(self.gradients.check_left)
        self.at_backward_end()

    def _drop_gradients(self) -> None:
        """After a failed backward: drop the replica gradients that are in transfer."""
        self._counters.abandoned_backwards += 1
        self.gradients.drop()
        self._with_transfers(lambda transfers: transfers.returns.abandon())


class MovePrice:
    """Seconds per byte that the busiest rank sends, equal on all ranks of an expert-parallel group.

    Attributes:
        s_per_byte: of the exchange of most bytes, since small ones take a minimum time; None before the first.
    """

    s_per_byte: float | None = None

    def __init__(self, topology: Topology) -> None:
        self._topology, self._most = topology, 0

    def measure(self, move: Callable[[], Array], device: torch.device) -> Array:
        """Measure an exchange of at least one expert. Collective over the ranks of the group.

        Args:
            move: returns the bytes `[R]` that each rank sent.
            device: the device of the experts.
        """
        # Opens connections and waits for the other ranks, so that the move's time includes neither.
        one_byte_R = torch.zeros(self._topology.num_ranks, dtype=torch.uint8, device=device)
        dist.all_to_all_single(torch.empty_like(one_byte_R), one_byte_R, group=self._topology.experts)
        start = _now(device)
        sent_R = move()
        slowest = torch.tensor(_now(device) - start, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._topology.expert_control)
        if sent_R.max() >= self._most:
            self._most = int(sent_R.max())
            self.s_per_byte = float(slowest) / self._most
        return sent_R


def _now(device: torch.device) -> float:
    """Seconds, when the device has done all work so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
