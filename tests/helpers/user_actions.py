"""What users hold, in a training loop: saved weights, sessions, optimizers, memory, new weights."""

from __future__ import annotations

import copy
import re
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from helpers.actions import forward
from helpers.loop import Loop, action, make_optimizer, make_session, zero_gradients
from helpers.moe_model import TinyMoE
from helpers.plans import plan
from trimtab.errors import InputError
from trimtab.trace.numbering import random_orders


@action
def save(loop: Loop) -> None:
    """Store state dicts, and the model's weights in order of experts."""
    parts = (loop.model, loop.optimizers[1], loop.reference, loop.optimizers[0])
    states = [part.state_dict() for part in parts]
    loop.saved = tuple(copy.deepcopy([*states, loop.session.whole_state_dict(loop.model)]))


@action
def reload(loop: Loop, seed: int) -> None:
    """Load what was stored."""
    if loop.saved is None:
        return
    model, session = loop.model, loop.session
    zero_gradients(loop)
    mine, state, whole, whole_state, saved = (copy.deepcopy(part) for part in loop.saved)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(mine)
    loop.reference.load_state_dict(whole)
    weights = session.whole_state_dict(model)
    assert all(torch.equal(weights[name], value) for name, value in saved.items())
    loop.optimizers[1].load_state_dict(state)
    loop.optimizers[0].load_state_dict(whole_state)
    loop.changes = loop.changes._replace(weights=loop.changes.weights + 1)
    loop.pending.clear()


@action
def save_distributed(loop: Loop) -> None:
    """Weights are saved and loaded by `torch.distributed.checkpoint`."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    save_checkpoint(loop.session.dcp_state_dict(loop.model), checkpoint_id=folder[0])
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.mul_(0.5).add_(0.1)
    load_checkpoint(loop.session.dcp_state_dict(loop.model), checkpoint_id=folder[0])
    loop.session.weights_changed()
    loop.changes = loop.changes._replace(weights=loop.changes.weights + 1)
    loop.pending.clear()


@action
def change_session(loop: Loop, seed: int) -> None:
    """Another session gets the model's experts, with their ids."""
    before = loop.session
    loop.pending.clear()
    loop.session = make_session(loop.options, loop.seed, before.num_experts)
    loop.session.mode = before.mode
    for block in loop.model.moe_blocks():
        block.run_in(loop.session)
    assert loop.session.numbering == before.numbering
    loop.session.register_optimizers(loop.optimizers[1])
    zero_gradients(loop)
    before.close()
    plan(loop, seed)


@action
def change_optimizer(loop: Loop, seed: int, replaces: bool = False) -> None:
    """Another optimizer with the same state, for the same parameters or for others that replace them.

    Args:
        replaces: the model gets other parameters; refused at the next micro-step if the session got a list.
    """
    old = loop.optimizers[1]
    if replaces:
        if not loop.model.moe_blocks()[0].is_read:
            return
        zero_gradients(loop)
        loop.pending.clear()
        frozen = {name for name, parameter in loop.model.named_parameters() if not parameter.requires_grad}
        values = {name: value.clone() for name, value in loop.model.state_dict().items()}
        loop.model.load_state_dict(values, assign=True)
        for name, parameter in loop.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
    new = make_optimizer(loop.options, loop.model)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    loop.session.register_optimizers(new)
    order_LE = random_orders(len(loop.session.layers), loop.session.num_experts, seed)
    has_state = any(p in old.state for layer in loop.session.layers for p in layer.parameters)
    if loop.has_stepped and has_state and (np.diff(order_LE) != 1).any():
        with pytest.raises(InputError, match=f"experts can't be renumbered: {type(old).__name__} has state"):
            loop.session.renumber(order_LE)
    # Nobody uses it any more.
    old.param_groups.clear()
    old.state.clear()
    loop.optimizers, loop.has_stepped = (loop.optimizers[0], new), False


@action
def repoint(loop: Loop) -> None:
    """Replace the memory of all parameters by a clone, as when weights are loaded or averaged."""
    for parameter in loop.model.parameters():
        parameter.data = parameter.data.clone()
    # Hidden from autograd's version check, which is not tested here.
    loop.pending.clear()


@action
def offload(loop: Loop) -> None:
    """The parameters' memory is freed."""
    loop.pending.clear()
    loop.offloaded_parameters = [parameter.data.clone() for parameter in loop.model.parameters()]
    for parameter in loop.model.parameters():
        parameter.data.untyped_storage().resize_(0)


def onload(loop: Loop) -> None:
    """The parameters get new memory."""
    if loop.offloaded_parameters is not None:
        for parameter, values in zip(loop.model.parameters(), loop.offloaded_parameters, strict=True):
            parameter.data = values
        loop.offloaded_parameters = None
    if loop.compares:
        loop.compare()


@action
def write(loop: Loop, way: str) -> None:
    """New weights: by tensor operations, announced writes through `.data`, or unannounced ones."""
    if way == "unnoticed":
        # Run a forward first, so that the session has copied the current weights.
        forward(loop, 0)
        for parameter in loop.model.parameters():
            parameter.data.mul_(2)
        with pytest.raises(RuntimeError, match=r"changed without an optimizer step"), loop.micro_step(0):
            pass
        for parameter in loop.model.parameters():
            parameter.data.div_(2)
        return
    # Alternately, since large weights would have large rounding errors.
    loop.writes += 1
    factor = 1.25 if loop.writes % 2 else 0.8
    for parameter in (*loop.model.parameters(), *loop.reference.parameters()):
        if way == "data":
            parameter.data.mul_(factor)
        else:
            with torch.no_grad():
                parameter.mul_(factor)
    if way == "data":
        loop.pending.clear()
        loop.session.weights_changed()
    loop.changes = loop.changes._replace(weights=loop.changes.weights + 1)


def load_by_position(model: TinyMoE, whole: TinyMoE, home: list[int]) -> None:
    """As frameworks load a reference model."""
    experts = re.compile(r"(blocks\.\d+\.(?:gate_up|down))(?:\.(\d+))?$")
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if match := experts.match(name):
                rows = [home[int(match[2])]] if match[2] else home
                whole_stack = weights.get(match[1])
                of_rows = [weights[f"{match[1]}.{row}"] if whole_stack is None else whole_stack[row] for row in rows]
                stack = torch.stack(of_rows)
                parameter.data.copy_(stack[0] if match[2] else stack)
            else:
                parameter.data.copy_(weights[name])


@action
def run_other_weights(loop: Loop, seed: int) -> None:
    """The weights of another model, loaded by position, route by themselves."""
    other = copy.deepcopy(loop.reference)
    generator = torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    for block in other.moe_blocks():
        block.recorded_ids = None
    loop.model.run_block = other.run_block = "plain"
    loop.model.skipped = other.skipped = frozenset()
    mine = [parameter.detach().clone() for parameter in loop.model.parameters()]
    loop.pending.clear()
    load_by_position(loop.model, other, loop.session.home_experts.tolist())
    tokens = loop.tokens[loop.rows(0, loop.data_rank)] if len(loop.tokens) else loop.tokens
    loop.session.weights_changed()
    with torch.no_grad():
        assert loop.error_of(loop.model(tokens), other(tokens)) < 1
    for parameter, value in zip(loop.model.parameters(), mine, strict=True):
        parameter.data.copy_(value)
    loop.session.weights_changed()
