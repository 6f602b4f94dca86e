"""Actions on what a user holds, in a loop of `any_loop`: saved weights, sessions, optimizers, memory, new weights."""

from __future__ import annotations

import copy
import gc
import re

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from helpers.any_loop import forward, plan
from helpers.equality import relative_error
from helpers.loop_state import TOLERANCE, Loop, action, compare, zero_gradients
from helpers.moe_model import TinyMoE
from helpers.random_plans import random_placement
from trimtab.errors import InputError
from trimtab.runtime import Session


@action
def save(loop: Loop) -> None:
    """Store state dicts, and the model's weights in order of experts."""
    parts = (loop.model, loop.optimizers[1], loop.reference, loop.optimizers[0])
    states = [part.state_dict() for part in parts]
    loop.saved = tuple(copy.deepcopy([*states, loop.session.logical_state_dict(loop.model)]))


@action
def reload(loop: Loop, seed: int) -> None:
    """Load what was stored, after experts have returned to the places that they had. Before that it is refused, or
    modules put rows in order."""
    if loop.saved is None:
        return
    model, session = loop.model, loop.session
    zero_gradients(loop, True)
    mine, state, whole, whole_state, saved = (copy.deepcopy(part) for part in loop.saved)
    before = [layer.places for layer in session.homes]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    try:
        model.load_state_dict(mine)
        is_loaded = True
    except RuntimeError as error:
        assert "move_to_saved" in str(error)
        is_loaded = False
    loop.reference.load_state_dict(whole)
    if is_loaded:
        weights = session.logical_state_dict(model)
        assert all(torch.equal(weights[name], value) for name, value in saved.items())
    session.move_to_saved(model, mine)
    model.load_state_dict(mine)
    loop.optimizers[1].load_state_dict(state)
    loop.optimizers[0].load_state_dict(whole_state)
    loop.changes = loop.changes._replace(weights=loop.changes.weights + 1)
    loop.pending.clear()
    if any(layer.places is not places for layer, places in zip(session.homes, before, strict=True)):
        plan(loop, seed, False, session.mode)


@action
def change_session(loop: Loop, seed: int) -> None:
    """Another session gets the model's experts, where they are."""
    before, settings = loop.session, loop.session.settings
    loop.pending.clear()
    loop.session = Session(
        num_experts=settings.num_experts, slots_per_rank=settings.slots_per_rank, ring_layers=settings.ring_layers,
        ranks_per_node=before.topology.ranks_per_node, verify_weights=settings.verify_weights, mode=before.mode,
    )  # fmt: skip
    for block in loop.model.moe_blocks():
        block.run_in(loop.session)
    assert np.array_equal(loop.session.placement.home, before.placement.home)
    loop.session.register_optimizers(loop.optimizers[1])
    zero_gradients(loop, True)
    before.close()
    plan(loop, seed, False, loop.session.mode)


@action
def change_optimizer(loop: Loop, seed: int, replaces: bool) -> None:
    """Another optimizer with the same state, for the same parameters or for others that replace them.

    Args:
        replaces: the model gets other parameters; refused at the next micro-step if the session got a list.
    """
    old = loop.optimizers[1]
    if replaces:
        if not loop.model.moe_blocks()[0].is_read:
            return
        zero_gradients(loop, True)
        loop.pending.clear()
        frozen = {name for name, parameter in loop.model.named_parameters() if not parameter.requires_grad}
        values = {name: value.clone() for name, value in loop.model.state_dict().items()}
        loop.model.load_state_dict(values, assign=True)
        for name, parameter in loop.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
    new = torch.optim.AdamW(loop.model.parameters(), lr=0.01, eps=0.1, foreach=False)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    loop.session.register_optimizers(new)
    placement = random_placement(
        np.random.default_rng(seed), len(loop.session.layers), loop.session.num_experts, loop.session.num_ranks
    )
    has_state = any(p in old.state for layer in loop.session.layers for p in layer.parameters)
    if loop.has_stepped and has_state and not np.array_equal(placement.home, loop.session.placement.home):
        with pytest.raises(InputError, match="experts can't move: AdamW has state"):
            loop.session.move(placement)
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
    compare(loop)


@action
def write(loop: Loop, way: str) -> None:
    """New weights: by tensor operations, announced writes through `.data`, or unannounced ones."""
    if way == "unnoticed":
        # Run a forward first, so that the session has copied the current weights.
        forward(loop, 0)
        for parameter in loop.model.parameters():
            parameter.data.mul_(2)
        with pytest.raises(RuntimeError, match=r"changed without an optimizer step"), loop.session.micro_step(0):
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
    # Where experts are away from their first homes, they could be the weights of another model.
    if way == "data" or any(not layer.known.are_first for layer in loop.session.homes):
        loop.session.weights_changed()
    loop.changes = loop.changes._replace(weights=loop.changes.weights + 1)


def load_by_position(model: TinyMoE, whole: TinyMoE, home: list[int]) -> None:
    """As frameworks load a reference model: rows are those of the experts that the rank held at first."""
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
    """The weights of another model, loaded by position, run at the first homes."""
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
    tokens = loop.tokens[loop.rows(0, loop.session.rank)] if len(loop.tokens) else loop.tokens
    with loop.session.first_homes(), torch.no_grad():
        assert relative_error(loop.model(tokens), other(tokens)) < TOLERANCE
    for parameter, value in zip(loop.model.parameters(), mine, strict=True):
        parameter.data.copy_(value)


@action
def wrap_in_ddp(loop: Loop, views: bool = False) -> None:
    """Data parallelism over all parameters is refused in the first backward; the loop goes on without it.

    Args:
        views: gradients are views of its buckets; else it changes them in place.
    """
    mine = [parameter.detach().clone() for parameter in loop.model.parameters()]
    zero_gradients(loop, True)
    loop.pending.clear()
    loop.model.run_block, loop.model.skipped = "plain", frozenset()
    whole = DistributedDataParallel(loop.model, gradient_as_bucket_view=views)
    for parameter, value in zip(loop.model.parameters(), mine, strict=True):
        parameter.data.copy_(value)
    loss = whole(loop.tokens).sum()
    if any(parameter.requires_grad for layer in loop.session.layers for parameter in layer.parameters):
        with pytest.raises(RuntimeError, match="_ddp_params_and_buffers_to_ignore"):
            loss.backward()
    del whole, loss
    gc.collect()
    zero_gradients(loop, True)
