"""`Site`: where all ranks measure together, so that cores, memory and links are shared as in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trimtab.calibration.timing import Clock, Mark, medians
from trimtab.cluster import ModelSpec
from trimtab.runtime.ranks.topology import Topology


@dataclass(frozen=True, eq=False)
class Site:
    """One rank's view of what is measured with.

    Attributes:
        topology: of all ranks.
        alone: a group of this rank only.
        model: whose operations are measured, in the weights that it is computed in.
        dtype: of those weights.
        tokens: of a rank in a micro-step.
        sequence_length: of most of them.
        rounds: timed repetitions of everything.
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

    def begin(self) -> Mark:
        """Now, with nothing under way on any rank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(group=self.topology.control)
        return self.clock.now()

    def medians(self, variants: Mapping[str, Callable[[], dict[str, float]]]) -> dict[str, dict[str, float]]:
        """The median over rounds of every figure of every variant, mean over ranks. Collective."""
        taken = medians(variants, self.rounds)
        values = torch.tensor([value for figures in taken.values() for value in figures.values()], dtype=torch.float64)
        dist.all_reduce(values, group=self.topology.control)
        means = iter((values / self.topology.num_ranks).tolist())
        return {name: {figure: next(means) for figure in figures} for name, figures in taken.items()}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)
