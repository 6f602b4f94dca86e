"""Blocks of FSDP2 frameworks, from their own source, run in a session through `add_fsdp_layer` as whole ones do."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.equality import relative_error
from helpers.fsdp_blocks import EXPERTS, FRAMEWORKS, HIDDEN, SOURCES, TOP_K, make_net
from helpers.random_plans import random_group_plans
from helpers.rank_pool import on_ranks
from trimtab.runtime import Session, step_planner

RANKS, LAYERS = 4, 2


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_random_replicas_equal_whole_blocks(name: str, dim: int) -> None:
    """Experts on 2 of 4 ranks, each of whose parameters FSDP2 shards in this dimension over the other 2."""
    if not (SOURCES / FRAMEWORKS[name].folder).is_dir():
        pytest.skip(f"needs {FRAMEWORKS[name].folder} in FSDP_BLOCKS; see make test-fsdp-blocks")
    on_ranks(compare, (name, dim), ranks=RANKS, patched=name)


def compare(name: str, dim: int) -> None:
    """Three optimizer steps of the net in a session, and of the whole one on this rank."""
    framework = FRAMEWORKS[name]
    torch.set_num_threads(1)
    net = make_net(framework, LAYERS)
    plain, rank = copy.deepcopy(net), dist.get_rank()
    experts_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    dense_mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    for block in net.blocks:
        experts = framework.experts(block)
        for each, parameter in experts.named_parameters():
            part = distribute_tensor(parameter.detach(), experts_mesh["ep"], [Shard(0)], src_data_rank=None)
            setattr(experts, each, nn.Parameter(part))
        owner = block if framework.shards_layer else experts
        if framework.shards_layer:
            shard_layer(block, set(experts.parameters()), experts_mesh["efsdp"], dense_mesh, dim)
        else:
            placement: Any = (lambda _: Shard(1)) if dim else None
            fully_shard(experts, mesh=experts_mesh["efsdp"], shard_placement_fn=placement)
        owner.set_gradient_divide_factor(float(RANKS))  # type: ignore[operator]
        owner.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    fully_shard(net, mesh=dense_mesh)
    session = Session(num_experts=EXPERTS, groups=2, slots_per_rank=2, rates=step_planner.LOCAL_CPU)
    for block in net.blocks:
        framework.adapt(session, block if framework.shards_layer else framework.experts(block), block)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, foreach=False) for model in (net, plain)]
    rng, plans, replicas = np.random.default_rng(1), np.random.default_rng(5), 0

    def random_plans(loads: Any, schedule: Any, placement: Any, cluster: Any, **_: Any) -> Any:
        return random_group_plans(plans, loads, schedule, placement, cluster.ranks_per_node)

    for _ in range(3):
        batches = []
        for _ in range(RANKS):
            tokens = int(rng.integers(6, 12))
            scores = rng.gumbel(size=(tokens, LAYERS, EXPERTS)) + np.linspace(3, 0, EXPERTS)
            x = torch.from_numpy(rng.normal(size=(1, tokens, HIDDEN)).astype(np.float32))
            batches.append((x, np.argsort(-scores, -1)[..., :TOP_K].copy()))
        with mock.patch.object(step_planner, "plan_schedule", random_plans):
            replicas += session.plan_micro_steps([batches[rank][1]]).replicas
        with session.micro_step(0):
            loss = net(batches[rank][0])
            loss.backward()
        session.finish_gradients()
        for number, (x, ids) in enumerate(batches):
            wanted = chosen_loss(plain, x, ids)
            (wanted / RANKS).backward()
            if number == rank:
                assert relative_error(loss.detach(), wanted.detach()) < 1e-5
        for (each, one), other in zip(net.named_parameters(), plain.parameters(), strict=True):
            whole: Any = one.grad
            assert relative_error(whole.full_tensor(), other.grad) < 1e-4, each  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert replicas > 0
    session.close()


def chosen_loss(plain: Any, x: torch.Tensor, ids: Any) -> torch.Tensor:
    """The loss of a whole net whose routers choose these experts."""
    layers = iter(range(LAYERS))

    def choose(scores: torch.Tensor, k: int, **_: Any) -> Any:
        chosen = torch.from_numpy(ids[:, next(layers)].copy()).view(*scores.shape[:-1], k)
        return scores.gather(-1, chosen), chosen

    with mock.patch("torch.topk", choose):
        loss: torch.Tensor = plain(x)
    return loss


def shard_layer(
    block: Any, experts: set[nn.Parameter], expert_mesh: DeviceMesh, dense_mesh: DeviceMesh, dim: int
) -> None:
    """As torchtitan/distributed/fsdp.py of 0.3.0 does with expert parallelism."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    of_experts, others = (FSDPMeshInfo(mesh=each, shard_mesh_dim=0) for each in (expert_mesh, dense_mesh))

    def placement(parameter: nn.Parameter) -> Any:
        is_expert = parameter in experts
        return ShardPlacementResult(
            placement=Shard(dim if is_expert else 0), mesh_info=of_experts if is_expert else others
        )

    fully_shard(block, mesh=dense_mesh, shard_placement_fn=placement)
