"""Experts that FSDP2 shards over several ranks, replicates, casts, or beside tensor parallelism, equal "all_to_all"."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.equality import relative_error
from helpers.examples import nightly_except
from helpers.moe_families import NUM_EXPERTS, TOP_K, all_chosen, random_model, small_config
from helpers.random_plans import random_group_plans
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from integrations.test_expert_parallel import load
from trimtab import InputError
from trimtab.integrations.expert_parallel import register, rows_of_rank, session_of
from trimtab.integrations.fsdp import add_fsdp_layer
from trimtab.integrations.transformers import moe_blocks
from trimtab.runtime import Session, gated_experts, step_planner

RANKS = 4
# The small model has one key-value head: of the model's own plan the head alone, so that ranks share a batch.
TP = {"tp_size": 2, "fsdp_size": 2, "tp_plan": {"lm_head": "colwise_gather_output"}}


@dataclass(frozen=True)
class Layout:
    """Sizes of a `DistributedConfig`, and the bytes of copies of a layer's experts as parts of the whole layer."""

    name: str
    sizes: dict[str, Any]
    copied: float = 0.0
    checkpointing: bool = False
    tolerance: float = 1e-5
    session: dict[str, Any] = field(default_factory=dict)


LAYOUTS = [
    Layout("efsdp", {"fsdp_size": 4, "ep_size": 2}, copied=1 / 2),
    Layout("whole", {"fsdp_size": 4, "ep_size": 4}),
    Layout("hsdp", {"fsdp_size": 2, "ep_size": 2, "dp_replicate_size": 2}),
    Layout("mixed", {"fsdp_size": 4, "ep_size": 2, "fsdp_mixed_precision": True}, copied=1 / 4, tolerance=0.1),
    Layout("whole, mixed", {"fsdp_size": 4, "ep_size": 4, "fsdp_mixed_precision": True}, copied=1 / 8, tolerance=0.1),
    Layout("checkpointing", {"fsdp_size": 4, "ep_size": 2}, copied=1 / 2, checkpointing=True),
    Layout("tp", TP | {"ep_size": 2}, copied=1 / 2),
    Layout("tp_ep4", TP | {"ep_size": 4}),
    Layout("nodes", {"fsdp_size": 4, "ep_size": 4}, session={"ranks_per_node": 2}),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    random_model(small_config("qwen3_moe"), torch.float32).save_pretrained(path / "qwen3_moe")
    return path


def make(saved: Path, layout: Layout, **options: Any) -> tuple[Any, Any, Session]:
    """The same model with "all_to_all" and in a session."""
    register()
    torch.set_num_threads(1)
    models = [load(saved, name, **layout.sizes) for name in ("all_to_all", "trimtab")]
    session = session_of(models[1], slots_per_rank=2, mode="plan", rates=step_planner.LOCAL_CPU, **options)
    if layout.checkpointing:
        models[1].gradient_checkpointing_enable({"use_reentrant": False})
    return models[0], models[1], session


def without_head_alone(layout: Layout) -> Any:
    """transformers' plan of tensor parallelism splits heads, of which the small model has too few."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    return (
        mock.patch.object(qwen.Qwen3MoeConfig, "base_model_tp_plan", {}) if "tp_size" in layout.sizes else nullcontext()
    )


@pytest.mark.parametrize(
    "layout", nightly_except(LAYOUTS, *(LAYOUTS[n] for n in (0, 2, 6))), ids=lambda each: each.name
)
@runs_on_ranks(RANKS)
def test_random_replicas_equal_all_to_all(saved: Path, layout: Layout) -> None:
    """Over optimizer steps; gradients are reduced once a step."""
    rank, tp = dist.get_rank(), layout.sizes.get("tp_size", 1)
    rng, plans = np.random.default_rng(rank // tp), np.random.default_rng(5)

    def random_plans(loads: Any, schedule: Any, placement: Any, cluster: Any, **_: Any) -> Any:
        return random_group_plans(plans, loads, schedule, placement, cluster.ranks_per_node)

    with without_head_alone(layout), mock.patch.object(step_planner, "plan_schedule", random_plans):
        expected, actual, session = make(saved, layout, **layout.session)
        layer = sum(parameter.nbytes for parameter in moe_blocks(expected)[0].experts.parameters())
        rate = 1e-4 if layout.tolerance > 0.01 else 0.1
        optimizers = [
            torch.optim.SGD(each.parameters(), lr=rate, momentum=0.9, foreach=False) for each in (expected, actual)
        ]
        replicas = 0
        for step in range(3):
            batches = []
            for _ in range(2):
                tokens = int(rng.integers(5, 14))
                scores = rng.gumbel(size=(tokens, len(session.layers), NUM_EXPERTS)) + np.linspace(3, 0, NUM_EXPERTS)
                ids = np.argsort(-scores, axis=-1)[:, :, :TOP_K]
                batches.append((torch.from_numpy(rng.integers(1, 28, (1, tokens))), ids))
            report = session.plan_micro_steps([ids[rows_of_rank(actual, len(ids))] for _, ids in batches])
            replicas += report.replicas
            for index, (tokens_BT, ids) in enumerate(batches):
                for model in (expected, actual):
                    model.set_requires_gradient_sync(index == 1)
                with all_chosen(expected, torch.from_numpy(ids.copy())):
                    wanted = expected(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
                    wanted.backward()
                if step == 2 and index == 1 and rank < session.num_ranks:
                    # In one expert-parallel group alone.
                    session.weights_changed()
                with session.micro_step(index):
                    found = actual(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
                    found.backward()
                assert relative_error(found.detach(), wanted.detach()) < layout.tolerance, (step, index)
            session.finish_gradients()
            for (name, one), other in zip(actual.named_parameters(), expected.parameters(), strict=True):
                error = relative_error(one.grad.to_local(), other.grad.to_local())
                assert error < layout.tolerance, (layout, step, name, error)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert replicas > 10
    assert session.memory().staging_bytes == len(session.layers) * layer * layout.copied
    assert sum(of_all_ranks(session.take_metrics()["transfer/gradient_bytes"])) > 0
    assert session.counters.unplanned_micro_steps == 0
    session.close()


@runs_on_ranks(RANKS)
def test_shards_that_are_whole_on_one_rank_and_empty_on_the_next() -> None:
    """One expert a rank: FSDP2 gives it to the first of the two that have it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    experts, whole = Experts(2), Experts(2)
    whole.load_state_dict(experts.state_dict())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    for name in Experts.names:
        part = distribute_tensor(getattr(experts, name).detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(part))
    fully_shard(experts, mesh=mesh["efsdp"])
    session = Session(num_experts=2, groups=2)
    layer = add_fsdp_layer(session, experts, Experts.names, gated_experts())
    experts.forward = layer  # type: ignore[method-assign]
    rng = np.random.default_rng(dist.get_rank())
    ids, hidden = rng.integers(0, 2, (6, 1, 1)), torch.from_numpy(rng.normal(size=(6, 8)).astype(np.float32))
    session.plan_micro_steps([ids])
    with session.micro_step(0):
        found = experts(hidden, layer.route(torch.from_numpy(ids[:, 0])), torch.ones(6, 1))
        found.square().sum().backward()
    session.finish_gradients()
    rows = [torch.from_numpy(ids[:, 0, 0]) == expert for expert in range(2)]
    for expert, mine in enumerate(rows):
        gate, up = (hidden[mine] @ whole.up[expert].T).chunk(2, dim=-1)
        wanted = (torch.nn.functional.silu(gate) * up) @ whole.down[expert].T
        assert torch.allclose(found[mine], wanted, atol=1e-5)
    session.close()


class Experts(nn.Module):
    """Packed experts of width 8."""

    names = ("up", "down")

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(experts, 12, 8)), nn.Parameter(torch.randn(experts, 8, 6))


@runs_on_ranks(RANKS)
def test_copies_follow_weights_that_are_written(saved: Path) -> None:
    """Loaded into the model, without an optimizer step or a word to the session."""
    _, actual, session = make(saved, LAYOUTS[0])
    ids = np.argsort(np.random.default_rng(dist.get_rank()).random((6, len(session.layers), NUM_EXPERTS)))[..., :TOP_K]
    tokens = torch.arange(1, 7)[None]
    for factor in (1.0, 3.0):
        experts = moe_blocks(actual)[0].experts
        with torch.no_grad():
            experts.down_proj.mul_(factor)
        if factor == 1.0:
            session.plan_micro_steps([ids])
        with torch.no_grad(), session.micro_step(0):
            actual(input_ids=tokens, use_cache=False)
        whole = experts.down_proj.full_tensor()
        first = session.rank * NUM_EXPERTS // session.num_ranks
        (_, copy) = session.homes[0].tensors
        assert isinstance(copy, torch.Tensor)
        assert torch.equal(copy, whole[first : first + len(copy)])
    # Not again while nothing changes.
    refresh = session.homes[0].refresh
    session.homes[0].refresh = mock.Mock(side_effect=refresh)
    for index in (0, 0):
        with session.micro_step(index):
            actual(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert not session.homes[0].refresh.called
    session.close()


@runs_on_ranks(RANKS)
def test_sessions_of_other_groups_are_refused(saved: Path) -> None:
    register()
    model = load(saved, **LAYOUTS[0].sizes)
    with pytest.raises(InputError, match=r"ranks \[\d, \d\]; the session should have these in one group"):
        session_of(model, groups=1)
    with pytest.raises(InputError, match="not run by 'trimtab'"):
        session_of(load(saved, "all_to_all", **LAYOUTS[0].sizes))
