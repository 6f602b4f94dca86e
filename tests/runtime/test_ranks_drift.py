"""Loops in which ranks drift apart, or in which others change the gradients of experts: each raises, by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from helpers import actions, late_device
from helpers.actions import update
from helpers.loop import Loop
from helpers.plans import start
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import RanksDisagreeError


def skip_in_kernel(loop: Loop) -> None:
    """As a gradient scaler does with a fused optimizer, where the gradients of one rank alone are infinite."""
    optimizer = torch.optim.AdamW(loop.model.parameters(), lr=0.01, fused=True)
    loop.session.register_optimizers(optimizer)
    loop.session.finish_gradients(loop.model.replicated())
    optimizer.found_inf = torch.tensor(float(dist.get_rank() == 1))  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.step()


def clip_by_the_norm_of_one_rank(loop: Loop) -> None:
    loop.session.finish_gradients(loop.model.replicated())
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
    loop.optimizers[1].step()


def never_sum_dense_gradients(loop: Loop) -> None:
    loop.session.finish_gradients()
    loop.optimizers[1].step()


WAYS = {way.__name__: way for way in (skip_in_kernel, clip_by_the_norm_of_one_rank, never_sum_dense_gradients)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("on_device", [False, True])
@runs_on_ranks()
def test_dense_parameters_that_drift_are_named(way: str, on_device: bool) -> None:
    """Where the host does not wait for the device, one step later."""
    loop = start()
    assert loop.session.replicated_parameters(loop.model)
    with late_device.install("late") if on_device else nullcontext():
        run_until_noticed(loop, WAYS[way], 3 if on_device else 2)


def run_until_noticed(loop: Loop, way: Callable[[Loop], None], steps: int) -> None:
    for _ in range(steps - 1):
        update_model(loop)
        way(loop)
        loop.optimizers[1].zero_grad()
    update_model(loop)
    named = r"in finish_gradients\(\): replicated parameter \d+ \[.*\] (embed|mixes|blocks|head)\.\S+ is .* on rank 0"
    with pytest.raises(RanksDisagreeError, match=named):
        way(loop)


def update_model(loop: Loop) -> None:
    with loop.session.micro_step(0):
        loop.loss(loop.model, loop.rows(0, loop.session.rank))[0].backward()


@runs_on_ranks()
def test_what_a_framework_shards_may_differ() -> None:
    """An optimizer may hold shards beside the experts. NaN is equal to NaN."""
    loop = start()
    shard = torch.nn.Parameter(torch.full((3,), float(dist.get_rank())))
    lost = torch.nn.Parameter(torch.full((3,), float("nan")))
    # As shards of norms and biases are at first.
    norm = torch.nn.Parameter(torch.ones(3))
    loop.session.register_optimizers(loop.optimizers[1], torch.optim.SGD([shard, lost, norm], lr=0.1))
    for _ in range(2):
        update(loop)
        actions.step(loop)
        shard.data += 1 + dist.get_rank()
        norm.data += dist.get_rank()


@runs_on_ranks()
def test_a_parameter_that_is_registered_after_a_step_may_not_drift() -> None:
    loop = start()
    optimizers = [loop.optimizers[1]]
    for _ in range(2):
        parameter = torch.nn.Parameter(torch.arange(3.0))
        optimizers.append(torch.optim.SGD([parameter], lr=0.1))
        loop.session.register_optimizers(*optimizers)
        update(loop)
        actions.step(loop)
    parameter.data += dist.get_rank()
    update(loop)
    with pytest.raises(RanksDisagreeError, match=r"replicated parameter \d+ \[3\] is 1.0 on rank 0 and 2.0 on rank 1"):
        actions.step(loop)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
@runs_on_ranks()
def test_data_parallel_gradients_of_experts_are_refused(views: bool, ignored: bool) -> None:
    loop = start()
    if ignored:
        experts = {id(p) for layer in loop.session.homes for p in layer.parameters}
        names = [name for name, p in loop.model.named_parameters() if id(p) in experts]
        loop.model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
    whole = DistributedDataParallel(loop.model, gradient_as_bucket_view=views)
    with loop.session.micro_step(0):
        loss = whole(loop.tokens[loop.rows(0, loop.session.rank)]).sum()
    if ignored:
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match=r"MoE layer \d: .*gradient of an expert .* backward; .*_to_ignore"):
            loss.backward()


@runs_on_ranks()
def test_gradients_of_experts_that_a_hook_takes_away_are_refused() -> None:
    """As data parallelism with gradients in a flat buffer does. After the error the loop can go on without the hook."""
    loop = start()
    parameter = loop.session.layers[0].parameters[0]
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    handle = node.register_hook(lambda *_: setattr(parameter, "grad", None))
    with pytest.raises(
        RuntimeError, match=r"MoE layer 0: a hook (has moved the gradient|on an expert tensor would get)"
    ):
        update_model(loop)
    handle.remove()
    actions.zero(loop)
    update(loop)
    actions.step(loop)
