"""The numbers of a model's MoE layers, from the modules that its pipeline stages have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from trimtab.errors import InputError


def moe_layers(chunks: Sequence[nn.Module]) -> list[Any]:
    """The MoE layers of a model's chunks, in order. Those for multi-token prediction (MTP) are not among them: their
    routes are not recorded, and they stay Megatron's."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    modules = [module for chunk in chunks for module in chunk.modules()]
    mtp = {id(inner) for each in modules if isinstance(each, MultiTokenPredictionLayer) for inner in each.modules()}
    return [module for module in modules if isinstance(module, MoELayer) and id(module) not in mtp]


def number_layers(layers: Sequence[Any], problem: str, pipeline: dist.ProcessGroup | None) -> list[int]:
    """The places of all MoE layers among the layers of the model, from 0, ascending. Collective over the pipeline.

    Args:
        layers: the MoE layers of this rank, with Megatron's `layer_number`, from 1.
        problem: why this rank's layers can't be balanced; "" if they can.
        pipeline: the stages; None for the layers of this rank alone.

    Raises:
        InputError: on all stages, with the problem of the first one that has one; or if layers have no number, or two
            have the same.
    """
    mine = [layer.layer_number for layer in layers]
    stages: list[tuple[list[Any], str]] = [(mine, problem)]
    if pipeline is not None and pipeline.size() > 1:
        stages *= pipeline.size()
        dist.all_gather_object(stages, (mine, problem), group=pipeline)
    for problem in (found for _, found in stages if found):
        raise InputError(problem)
    numbers = [number for stage, _ in stages for number in stage]
    if wrong := [number for number in numbers if not isinstance(number, int) or numbers.count(number) > 1]:
        raise InputError(
            f"MoE layers have the numbers {numbers}, and {wrong[0]} is not that of one layer; give each its own "
            "layer_number in the whole model"
        )
    return sorted(number - 1 for number in numbers)
