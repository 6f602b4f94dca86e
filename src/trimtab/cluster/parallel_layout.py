"""`Layout`: how a model is divided over ranks beside expert parallelism, and which layers a pipeline stage has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster.models import ModelSpec
from trimtab.errors import InputError

DDP, ZERO1, FSDP = SHARDINGS = ("ddp", "zero1", "fsdp")
"""Sharding of training state over data ranks: nothing; optimizer state, as Megatron's distributed optimizer does;
parameters, gradients and optimizer state, as FSDP and ZeRO-3 do."""
SELECTIVE = "selective"
"""Activations that are cheap to compute are computed again for backward: norms' outputs, products of gate and up."""
Checkpointing = bool | str
"""False: all activations are kept; `SELECTIVE`; True: only the input of every layer is kept."""
GRANULARITIES: dict[str, Checkpointing] = {"none": False, SELECTIVE: SELECTIVE, "full": True}
"""Values of `checkpointing` by the names of Megatron's recompute granularities."""


@dataclass(frozen=True)
class Layout:
    """Parallelism of the dense parts. Experts are divided over the ranks of an expert-parallel group alone.

    A stage of the pipeline is all expert-parallel groups, so a run has `ranks * groups * pp` GPUs. The tokens of a
    sequence are divided over `tp * cp` ranks.

    Attributes:
        tp: tensor parallelism with sequence parallelism: ranks that share heads and widths of the dense parts.
        pp: stages of a 1F1B pipeline.
        cp: context parallelism: ranks that exchange keys and values of a sequence, in a ring.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1

    @property
    def pieces(self) -> int:
        """Ranks that share a sequence."""
        return self.tp * self.cp

    def check(self, model: ModelSpec, ranks: int, groups: int) -> None:
        """Raise InputError, with the nearest values that would do, unless a run of this layout can exist.

        Args:
            ranks: of an expert-parallel group.
            groups: of a stage.
        """
        heads, stage = model.attention_heads, ranks * groups
        if heads and heads % self.tp:
            near = _nearest(self.tp, (n for n in range(1, heads + 1) if heads % n == 0))
            raise InputError(f"--tp {self.tp} doesn't divide the {heads} attention heads of {model.name}; use {near}")
        if stage % self.pieces:
            near = _nearest(self.pieces, (n for n in range(1, stage + 1) if stage % n == 0))
            raise InputError(
                f"--tp {self.tp} times --cp {self.cp} is {self.pieces}, which doesn't divide the {stage} ranks of a "
                f"stage (--ranks {ranks} times --groups {groups}); their product should be {near}"
            )
        layers = model.moe_layers + model.dense_layers
        if self.pp > layers:
            raise InputError(f"--pp {self.pp}: {model.name} has {layers} layers; use {layers} or less")

    def stages(self, model: ModelSpec) -> Array:
        """Layers with experts, and without, of each stage: `[2, pp]` int64.

        Stages have equal numbers of layers if `pp` divides them; else embedding and output head count as a layer each,
        as Megatron can count them. Without known indices, layers without experts are the first.
        """
        layers = model.moe_layers + model.dense_layers
        sizes_P = _even_sizes(layers, self.pp)
        if layers % self.pp and self.pp > 1:
            with_ends_P = _even_sizes(layers + 2, self.pp)
            with_ends_P[[0, -1]] -= 1
            sizes_P = with_ends_P if with_ends_P.min() > 0 else sizes_P
        has_experts = np.zeros(layers, bool)
        has_experts[list(model.moe_layer_indices) or slice(model.dense_layers, None)] = True
        of_stage = np.repeat(np.arange(self.pp), sizes_P)
        return np.stack([np.bincount(of_stage[kind], minlength=self.pp) for kind in (has_experts, ~has_experts)])


def _even_sizes(number: int, parts: int) -> Array:
    """`[parts]` int64, as even as possible, larger ones first."""
    return np.full(parts, number // parts) + (np.arange(parts) < number % parts)


def _nearest(value: int, valid: Iterable[int]) -> str:
    """The valid numbers next to a value."""
    every = list(valid)
    below, above = [n for n in every if n < value][-1:], [n for n in every if n > value][:1]
    return " or ".join(str(n) for n in (*below, *above))
