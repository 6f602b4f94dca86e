"""What each rank needs to measure together with all others: a clock of its device, process groups, random experts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from trimtab.calibration.alternating_rounds import medians
from trimtab.cluster import ModelSpec
from trimtab.rank_variables import rank_variable
from trimtab.runtime import ExpertLayer, ExpertWeight, RowGroups, Session, gated_experts
from trimtab.runtime.ranks.topology import Topology
from trimtab.trace import RoutingTrace

Mark = float | torch.cuda.Event


class Clock:
    """Points in time: events on the device's stream on CUDA, else the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def now(self) -> Mark:
        """The time at which the work queued so far is done."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds between two times. Waits for both."""
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start

    def time(self, work: Callable[[], object]) -> float:
        """Seconds that work takes on an idle device."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        start = self.now()
        work()
        return self.seconds(start, self.now())


def this_device() -> torch.device:
    """This rank's CUDA device, or the CPU if there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def random_experts(model: ModelSpec, experts: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Random weights of some experts: gate and up `[experts, 2 * width, hidden]`, down `[experts, hidden, width]`."""
    width, hidden = model.expert_width, model.hidden_size
    shapes = ((experts, 2 * width, hidden), (experts, hidden, width))
    return [torch.randn(shape, dtype=dtype, device=device) * shape[-1] ** -0.5 for shape in shapes]


def run_experts(stacks: list[torch.Tensor], rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """Outputs `[N, hidden]` of rows that are grouped by expert."""
    return gated_experts()([ExpertWeight(stack) for stack in stacks], rows, groups)


def add_random_layer(session: Session, model: ModelSpec, dtype: torch.dtype, device: torch.device) -> ExpertLayer:
    """Add a layer of random experts to a session."""
    stacks = random_experts(model, len(session.home_experts), dtype, device)
    return session.add_layer([torch.nn.Parameter(stack) for stack in stacks], gated_experts())


def random_inputs(
    trace: RoutingTrace, model: ModelSpec, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of one layer for all tokens of a trace.

    Returns:
        Hidden states `[T, hidden]` that need a gradient, live ids `[T, K]` that replay replaces, router weights
        `[T, K]`, and a gradient of the outputs `[T, hidden]`.
    """
    shape = (trace.num_tokens, model.hidden_size)
    hidden, gradient = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    live_ids = torch.zeros(trace.num_tokens, trace.top_k, dtype=torch.int64, device=device)
    weights = torch.rand(live_ids.shape, dtype=dtype, device=device).softmax(dim=-1)
    return hidden.requires_grad_(), live_ids, weights, gradient


@dataclass(frozen=True, eq=False)
class MeasurementContext:
    """Device, process groups and sizes that one rank measures with.

    Attributes:
        topology: of all ranks.
        alone: a group of this rank only.
        device: of this rank.
        clock: of that device.
        model: sizes of the measured model; `weight_bytes` is that of `dtype`.
        dtype: of weights and activations.
        tokens: tokens per rank in a micro-step.
        sequence_length: usual tokens of a sequence.
        rounds: timed repetitions of each measurement.
    """

    topology: Topology
    alone: dist.ProcessGroup
    device: torch.device
    clock: Clock
    model: ModelSpec
    dtype: torch.dtype
    tokens: int
    sequence_length: int
    rounds: int

    @classmethod
    def of_all_ranks(cls, model: ModelSpec, *, tokens: int, sequence_length: int, rounds: int) -> MeasurementContext:
        """All ranks of this job measure together, in bfloat16 on CUDA, else in float32. Collective."""
        device, rank, ranks = this_device(), dist.get_rank(), dist.get_world_size()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        alone = [dist.new_group([one]) for one in range(ranks)][rank]
        assert alone is not None
        return cls(
            topology=Topology.build(None, 1, rank_variable("LOCAL_WORLD_SIZE", ranks)),
            alone=alone,
            device=device,
            clock=Clock(device),
            model=replace(model, weight_bytes=dtype.itemsize),
            dtype=dtype,
            tokens=tokens,
            sequence_length=sequence_length,
            rounds=rounds,
        )

    def begin(self) -> Mark:
        """The current time, when no rank has work in progress. Collective."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(group=self.topology.control)
        return self.clock.now()

    def medians(self, variants: Mapping[str, Callable[[], dict[str, float]]]) -> dict[str, dict[str, float]]:
        """Every figure of every variant: median over alternating rounds, mean over ranks. Collective."""
        taken = medians(variants, self.rounds)
        values = torch.tensor([value for figures in taken.values() for value in figures.values()], dtype=torch.float64)
        dist.all_reduce(values, group=self.topology.control)
        means = iter((values / self.topology.num_ranks).tolist())
        return {name: {figure: next(means) for figure in figures} for name, figures in taken.items()}

    def seconds(self, works: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Seconds of each work, started on all ranks at once: median over rounds, mean over ranks. Collective."""
        taken = self.medians({name: partial(self._time, work) for name, work in works.items()})
        return {name: figures["s"] for name, figures in taken.items()}

    def _time(self, work: Callable[[], object]) -> dict[str, float]:
        start = self.begin()
        work()
        return {"s": self.clock.seconds(start, self.clock.now())}

    def random(self, *shape: int) -> torch.Tensor:
        """Normally distributed values of `dtype` on `device`."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)
