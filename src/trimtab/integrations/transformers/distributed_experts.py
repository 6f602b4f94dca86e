"""Run a model's experts in a session, and make its routers replay the recorded routing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from trimtab.errors import InputError
from trimtab.integrations.transformers.families import (
    choose_experts,
    expert_products,
    expert_tensors,
    moe_blocks,
    router_of,
)
from trimtab.runtime import ExpertLayer, Session
from trimtab.trace.message_text import at_place


def distribute_experts(model: nn.Module, session: Session, *, compute_dtype: torch.dtype | None = None) -> None:
    """Keep only this rank's home experts in the model, run every MoE block in the session, and replay recorded routing.

    Expert parameters keep their names in the module tree, now with shape `[E / R, ...]`, and stay frozen if they
    were. Not a collective.

    Args:
        model: a whole model, equal on all ranks.
        session: with the model's number of experts.
        compute_dtype: of expert compute, if not the parameters' dtype: bfloat16 for float32 masters under autocast.

    Raises:
        InputError: if the model's type is not supported, or its experts are not plain tensors of all the session's
            experts (adapted, quantized or sharded). The model is then unchanged.
    """
    config: Any = model.config
    blocks = moe_blocks(model)
    for index, block in blocks.items():
        check_experts(block.experts, index, session.num_experts)
    session.auxiliary_loss = partial(auxiliary_loss, config)
    for block in blocks.values():
        experts, home = block.experts, torch.from_numpy(session.home_experts)
        names = expert_tensors(experts)
        for name in names:
            whole = getattr(experts, name)
            part = whole.detach()[home.to(whole.device)].clone()
            setattr(experts, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        read = partial(_parameters, experts, names)
        by_expert = partial(_by_expert, router_of(block), session.num_experts)
        layer = session.add_layer(read, expert_products(experts), compute_dtype=compute_dtype, by_expert=by_expert)
        session.homes[-1].expert_groups = (
            getattr(config, "n_group", None) or 1,
            getattr(config, "topk_group", None) or 1,
        )
        experts.forward = layer
        follow_layer(router_of(block), layer, config)
    leave_to_session(model, session)


def _by_expert(router: nn.Module, num_experts: int) -> list[torch.Tensor]:
    """The tensors of a router that have a row for each expert: its weight, and biases."""
    return [each for each in (*router.parameters(), *router.buffers()) if each.ndim and len(each) == num_experts]


def leave_to_session(model: nn.Module, session: Session) -> None:
    """Keep `DistributedDataParallel` from the experts of a session, of which every rank has others."""
    experts = {id(parameter) for layer in session.homes for parameter in layer.parameters}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in experts]
    ignored: Any = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    model._ddp_params_and_buffers_to_ignore = [*ignored, *names]  # type: ignore[assignment]


def auxiliary_loss(config: Any) -> str:
    """The model options that make a loss depend on the routes of all tokens; empty if there are none."""
    coefficient = getattr(config, "router_aux_loss_coef", 0)
    is_on = getattr(config, "output_router_logits", False) and coefficient
    return f"output_router_logits=True with router_aux_loss_coef={coefficient}" if is_on else ""


def follow_layer(router: nn.Module, layer: ExpertLayer, config: Any) -> None:
    """Make a router return the ids that the layer's session replays, with the router's own weights for them."""
    choose_experts(router, config, layer.route)


def check_experts(experts: nn.Module, layer: int, num_experts: int) -> None:
    """Raise InputError unless the experts are plain tensors, each of `num_experts` experts."""
    where = f"the experts of decoder layer {layer} ({type(experts).__name__})"
    with at_place(f"decoder layer {layer}"):
        expert_tensors(experts)
    for name, parameter in experts.named_parameters():
        if len(parameter) != num_experts:
            raise InputError(
                f"{where} hold {len(parameter)} in {name} and the session is for {num_experts}; "
                "give it the model's number of experts and a whole model that no session shares"
            )


def in_session(experts: Any) -> bool:
    """Whether a session runs these experts, through `distribute_experts` or transformers' expert parallelism."""
    implementation = getattr(experts, "ep_implementation", None)
    return isinstance(experts.forward, ExpertLayer) or isinstance(getattr(implementation, "layer", None), ExpertLayer)


def _parameters(experts: nn.Module, names: Sequence[str]) -> list[nn.Parameter]:
    """The module's current expert tensors."""
    return [getattr(experts, name) for name in names]
