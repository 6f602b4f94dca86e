"""`MeasurementContext`: what each rank needs to measure together with all others, as in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from trimtab.calibration.alternating_rounds import medians
from trimtab.calibration.random_experts import this_device
from trimtab.calibration.timing import Clock, Mark
from trimtab.cluster import ModelSpec
from trimtab.rank_variables import rank_variable
from trimtab.runtime.ranks.topology import Topology


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
