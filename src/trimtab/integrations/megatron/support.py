"""What of a Megatron model can be balanced, and by name what can't."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher
from torch import nn

from trimtab.cluster.specs import AUTO, AUTO_SLOTS
from trimtab.errors import InputError
from trimtab.integrations.megatron.experts import experts_of
from trimtab.integrations.megatron.option_tables import options_of, refusals
from trimtab.integrations.megatron.unknown_options import unknown_options

HYBRID_EP_RANKS = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
EXPERTS_ADVICE = "use SequentialMLP, or TEGroupedMLP with one weight for each expert and without fused operations"


def problems_of(config: Any, layers: Sequence[MoELayer], chunks: Sequence[nn.Module] = ()) -> list[str]:
    """Why a model can't be balanced, one line each; empty if it can.

    Args:
        config: the TransformerConfig of the MoE layers.
        layers: the MoE layers.
        chunks: the model's chunks. Options of data parallelism are read from those in DistributedDataParallel.
    """
    found = list(refusals(options_of(config)).values())
    for chunk in chunks:
        found += _problems_of_chunk(chunk)
    for layer in layers:
        found += _problems_of_layer(layer)
    return list(dict.fromkeys(found))


def check_supported(config: Any, layers: Sequence[MoELayer], chunks: Sequence[nn.Module] = ()) -> None:
    """Raises InputError with the first problem of `problems_of`, and the number of others."""
    found = problems_of(config, layers, chunks)
    if found:
        more = f" ({len(found) - 1} more: trimtab doctor --megatron lists them)" if len(found) > 1 else ""
        raise InputError(f"this Megatron model can't be balanced: {found[0]}{more}")


def warn_of_unknown(*configs: Any) -> None:
    """Log one warning, on rank 0, of options of Megatron's configs that `unknown_options` yields."""
    unknown = sorted({option for config in configs for option in unknown_options(config)})
    if unknown and dist.get_rank() == 0:
        logging.getLogger("trimtab").warning(
            "this version of Trimtab does not know these options of Megatron: %s; compare a step with mode off",
            ", ".join(unknown),
        )


def fitting_slots(layer: MoELayer, slots_per_rank: int | str, nodes: Sequence[int] | None) -> int | str:
    """The least number of slots, `slots_per_rank` or more, with which the layer's dispatcher works; of `auto` that, if
    its largest number is one, else of its smallest.

    HybridEP needs a multiple of 4 experts, H + S for each rank, in every NVLink domain (`csrc/hybrid_ep/config.cuh` in
    DeepEP's branch hybrid-ep). Domains have as many ranks as a variable says, or are whole nodes.

    Args:
        nodes: the node of each rank of the expert-parallel group; None if they have different numbers of ranks.
    """
    if (
        type(layer.token_dispatcher) is not MoEFlexTokenDispatcher
        or layer.config.moe_flex_dispatcher_backend != "hybridep"
    ):
        return slots_per_rank
    homes, ranks = layer.num_local_experts, 1 if nodes is None else list(nodes).count(nodes[0])
    text = os.environ.get(HYBRID_EP_RANKS, "")
    ranks = int(text) if text.isdecimal() else ranks
    if slots_per_rank == AUTO:
        if ranks * (homes + AUTO_SLOTS[-1]) % 4 == 0:
            return AUTO
        slots_per_rank = AUTO_SLOTS[0]
    least = int(slots_per_rank)
    return next(slots for slots in range(least, least + 4) if ranks * (homes + slots) % 4 == 0)


def auxiliary_loss(config: Any) -> str:
    """The model options that make a loss or a bias depend on the routes of all tokens; empty if there are none."""
    coefficients = config.moe_aux_loss_coeff
    several = coefficients if isinstance(coefficients, list | tuple) else [coefficients]
    found = {
        "moe_aux_loss_coeff": coefficients
        if config.moe_router_load_balancing_type != "none" and any(several)
        else None,
        "moe_z_loss_coeff": config.moe_z_loss_coeff,
        "moe_router_enable_expert_bias": config.moe_router_enable_expert_bias,
    }
    return ", ".join(f"{name}={value}" for name, value in found.items() if value)


def _problems_of_chunk(chunk: Any) -> list[str]:
    if "FullyShardedDataParallel" in type(chunk).__name__:
        return [
            f"the model is in {type(chunk).__name__}: home experts have to be whole Parameters on their rank; use "
            "Megatron's DistributedDataParallel"
        ]
    # The optimizer sets it on the wrapper, which is no option of it.
    name = "overlap_param_gather_with_optimizer_step"
    options = options_of(getattr(chunk, "ddp_config", None)) | {name: getattr(chunk, name, False)}
    return list(refusals(options).values())


def _problems_of_layer(layer: MoELayer) -> list[str]:
    where = f"MoE layer {layer.layer_number}"
    if type(layer) is not MoELayer:
        return [f"{where} is a {type(layer).__name__}; it should be Megatron's MoELayer"]
    found = []
    if type(layer.router) is not TopKRouter:
        found.append(f"{where} has a {type(layer.router).__name__}; it should be Megatron's TopKRouter")
    found += _dispatcher_problems(where, layer)
    experts = experts_of(layer.experts)
    if experts is None:
        found.append(f"{where} has experts in {type(layer.experts).__name__}; {EXPERTS_ADVICE}")
    elif not experts.tensors():
        found.append(f"{where} has experts without Parameters of their own, as adapters have them; merge these first")
    return found


def _dispatcher_problems(where: str, layer: MoELayer) -> list[str]:
    """Why a layer's dispatcher can't be used."""
    dispatcher = layer.token_dispatcher
    if type(dispatcher) not in (MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher):
        return [
            f"{where} dispatches by {type(dispatcher).__name__}; use moe_token_dispatcher_type='alltoall' or 'flex'"
        ]
    return []
