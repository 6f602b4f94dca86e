"""A small model in a session, and one whole model with which it is compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.equality import relative_error
from helpers.moe_model import ALL_LISTS, TinyMoE, matches
from helpers.planned_steps import SHAPE, Step
from trimtab.runtime import Session, gated_experts
from trimtab.trace.numbering import random_orders

LISTED = replace(SHAPE, lists=ALL_LISTS)
MIXED = replace(SHAPE, lists=("down",))
SHAPES = pytest.mark.parametrize("shape", [SHAPE, LISTED, MIXED], ids=["stacks", "lists", "both"])
TOKENS = torch.arange(11).repeat(3)


def renumber(session: Session, seed: int) -> None:
    session.renumber(random_orders(len(session.layers), session.num_experts, seed))


def error_of(model: TinyMoE, reference: TinyMoE) -> float:
    """The error of the logits of the model, on live routing."""
    for block in reference.moe_blocks():
        block.recorded_ids = None
    with torch.no_grad():
        return relative_error(model(TOKENS), reference(TOKENS))


def saved(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def change(model: TinyMoE) -> None:
    """Other weights, so that only loading gives the old ones back."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(0.1)


def momentum_error(model: TinyMoE, optimizers: list[Any], reference: TinyMoE, expected: Any) -> float:
    """The largest error of the optimizers' state of all parameters."""
    return max(
        relative_error(optimizer.state[parameter]["exp_avg"], expected.state[whole]["exp_avg"][mine])
        for _, parameter, whole, mine in matches(model, reference)
        for optimizer in optimizers
        if parameter in optimizer.state
    )


def train(session: Session, model: TinyMoE, reference: TinyMoE, seed: int, *optimizers: Any) -> None:
    """A step of the model in the session and of the reference."""
    step = Step(seed)
    step.apply(session)
    step.reference_loss(reference).backward()
    step.run(session, model)
    for optimizer in optimizers:
        optimizer.step()
    for each in (model, reference):
        each.zero_grad()


def adamw(model: nn.Module | list[nn.Parameter]) -> torch.optim.AdamW:
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    return torch.optim.AdamW(parameters, lr=0.01, eps=0.1)


def again(model: TinyMoE, **settings: Any) -> Session:
    """Another session over the experts of a model; the model runs in it."""
    session = Session(**{"num_experts": SHAPE.experts} | settings)
    for block in model.moe_blocks():
        block.layer = session.add_layer(
            [t if isinstance(t, nn.Parameter) else list(t) for t in (block.gate_up, block.down)], gated_experts()
        )
    return session
