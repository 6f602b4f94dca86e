"""prime-rl's plugin: what it refuses, its launcher, and, with its source in FSDP_BLOCKS, steps of its trainer."""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Sequence
from types import SimpleNamespace
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
from helpers.fsdp_blocks import EXPERTS, FRAMEWORKS, HIDDEN, SOURCES, TOP_K, make_net
from helpers.random_plans import random_group_plans
from helpers.rank_pool import on_ranks
from trimtab import InputError
from trimtab.integrations import prime_rl
from trimtab.integrations.options import PluginOptions
from trimtab.runtime import step_planner

SOURCE = SOURCES / "prime_rl" / "prime_rl"
RANKS, MICRO_BATCHES = 4, 2
needs_source = pytest.mark.skipif(
    not SOURCE.is_dir(), reason="needs prime_rl in FSDP_BLOCKS; see make test-fsdp-blocks"
)


def test_configs_that_can_not_be_balanced_are_named() -> None:
    good = SimpleNamespace(ep=8, cp=1, full_offload=None, fsdp_cpu_offload=False, lora=None, quantization=None)
    assert prime_rl.refused(good) == []
    for name, value in {"cp": 2, "full_offload": "yes", "fsdp_cpu_offload": True, "lora": "yes", "ep": 1}.items():
        (line,) = prime_rl.refused(SimpleNamespace(**{**vars(good), name: value}))
        assert f"model.{name}" in line


def test_tokens_without_a_route_have_only_zeros() -> None:
    ids = np.array([[[1, 0], [0, 2]], [[0, 0], [0, 0]], [[0, 0], [3, 1]]])
    assert prime_rl.without_route(ids).tolist() == [False, True, False]
    with pytest.raises(InputError, match="top-1"):
        prime_rl.without_route(ids[..., :1])


def test_the_launcher_starts_this_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    launcher: Any = SimpleNamespace(Popen=lambda command, **_: started.append(command))

    def main() -> None:
        launcher.Popen(["torchrun", "-m", prime_rl.TRAINER, "@", "trainer.json"], env={})
        launcher.Popen("tail -F log", shell=True)

    launcher.main = main
    monkeypatch.setitem(sys.modules, prime_rl.LAUNCHER, launcher)
    assert prime_rl.main(["rl", "@", "rl.toml"]) == 0
    assert started == [["torchrun", "-m", "trimtab.integrations.prime_rl", "@", "trainer.json"], "tail -F log"]
    assert sys.argv == ["rl", "@", "rl.toml"]


def test_another_version_and_shadow_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="no forward, get_load_balance_stats"):
        prime_rl.Balancer(PluginOptions(), SimpleNamespace(DataLoader=object), SimpleNamespace()).install()
    monkeypatch.setenv("TRIMTAB_BALANCE", "mode=shadow")
    assert prime_rl.main(["@", "trainer.json"]) == 2
    assert "mode=shadow" in capsys.readouterr().err


@needs_source
def test_the_trainer_calls_what_is_replaced_in_this_order() -> None:
    tree = ast.parse((SOURCE / "trainer" / "rl" / "train.py").read_text())
    (train,) = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "train"]
    calls = [each for each in ast.walk(train) if isinstance(each, ast.Call)]
    lines = {ast.unparse(call.func): call.lineno for call in sorted(calls, key=lambda call: -call.lineno)}
    order = ("setup_model", "DataLoader", "dataloader.get_batch", "forward", "loss.backward", "scale_gradients_",
             "clip_grad_norm_", "optimizer.step")  # fmt: skip
    assert [lines[name] for name in order] == sorted(lines[name] for name in order)
    assert "get_load_balance_stats" in lines
    names = {
        alias.asname or alias.name for each in tree.body if isinstance(each, ast.ImportFrom) for alias in each.names
    }
    assert {*prime_rl.NEEDED} - {"main"} <= names


@needs_source
@pytest.mark.parametrize("bias", [False, True])
def test_steps_equal_whole_blocks(bias: bool) -> None:
    """Experts on 2 of 4 ranks; two micro-batches with padding, decoder layers with and without experts."""
    on_ranks(compare, (bias,), ranks=RANKS, patched="prime-rl")


class Decoder(nn.Module):
    """Layers 0 and 2 have experts."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(3))
        for layer, mlp in zip(self.layers, (blocks[0], nn.Linear(HIDDEN, HIDDEN), blocks[1]), strict=True):
            layer.mlp = mlp

    def forward(self, x: torch.Tensor, routed_experts: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            known = {} if number == 1 else {"routed_experts": routed_experts[:, :, number]}
            mlp: Any = layer.mlp
            x = x + mlp(torch.tanh(x), **known)
        return (x * mask[..., None]).square().sum()


def compare(bias: bool) -> None:
    """Three steps in the order of the trainer, and of the whole model on this rank."""
    torch.set_num_threads(1)
    blocks = make_net(FRAMEWORKS["prime-rl"], 2).blocks
    for block in blocks if bias else ():
        block.expert_bias = torch.linspace(0, 0.1, EXPERTS)
    model: Any = Decoder(list(blocks))
    plain, rank = copy.deepcopy(model), dist.get_rank()
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    batches: list[Any] = []

    def setup_model(config: Any, dims: Any, _later: bool) -> Any:
        builder.apply_ep(model, config, dims)
        for layer in model.layers[::2]:
            fully_shard(layer.mlp.experts, mesh=meshes["efsdp"])
            layer.mlp.experts.set_gradient_divide_factor(float(RANKS))
            layer.mlp.experts.set_force_sum_reduction_for_comms(True)
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",)))
        return model

    def apply_ep(model: Any, config: Any, dims: Any) -> None:
        assert config.ep_comm_backend == "deepep"
        for layer in model.layers[::2]:
            for each, parameter in layer.mlp.experts.named_parameters():
                part = distribute_tensor(parameter.detach(), dims.get_mesh("ep"), [Shard(0)], src_data_rank=None)
                setattr(layer.mlp.experts, each, nn.Parameter(part))

    loader = type("DataLoader", (), {"get_batch": lambda self: batches})
    trainer: Any = SimpleNamespace(
        setup_model=setup_model, DataLoader=loader, forward=lambda model, **named: model(**named), main=None,
        scale_gradients_=lambda *_: None, get_load_balance_stats=lambda _: {"max_vio": None},
    )  # fmt: skip
    builder: Any = SimpleNamespace(apply_ep=apply_ep, get_language_model=lambda model: model)
    balancer = prime_rl.Balancer(PluginOptions(slots_per_rank=2), trainer, builder)
    balancer.compute_dtype = None
    balancer.install()
    config = SimpleNamespace(ep=2, ep_comm_backend="torch", model_copy=lambda update: SimpleNamespace(**update))
    dims = SimpleNamespace(get_mesh=lambda name: meshes[name])
    trainer.setup_model(config, dims, False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01, foreach=False) for each in (model, plain)]
    rng, plans = np.random.default_rng(1), np.random.default_rng(5)

    def random_plans(loads: Any, schedule: Any, placement: Any, cluster: Any, **_: Any) -> Any:
        return random_group_plans(plans, loads, schedule, placement, cluster.ranks_per_node)

    replicas = 0.0
    for _ in range(3):
        of_ranks = [[batch_of(rng) for _ in range(MICRO_BATCHES)] for _ in range(RANKS)]
        batches[:] = of_ranks[rank]
        with mock.patch.object(step_planner, "plan_schedule", random_plans):
            found = trainer.DataLoader().get_batch()
        for batch in found:
            trainer.forward(model, **batch).backward()
        trainer.scale_gradients_(None, model, 1.0)
        replicas += trainer.get_load_balance_stats(model)["trimtab/replicas"].item()
        for batch in (each for mine in of_ranks for each in mine):
            (plain(**batch) / RANKS).backward()
        for (each, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert relative_error(one.grad.full_tensor(), other.grad) < 1e-4, each
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert replicas > 0
    balancer.session.close()  # type: ignore[union-attr]


def batch_of(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """A micro-batch with padding at its end: ids 0, which the loss does not read."""
    tokens, padding = int(rng.integers(6, 12)), int(rng.integers(1, 4))
    scores = rng.gumbel(size=(tokens + padding, 3, EXPERTS)) + np.linspace(3, 0, EXPERTS)
    ids = np.argsort(-scores, -1)[..., :TOP_K].copy()
    ids[tokens:] = 0
    mask = (np.arange(tokens + padding) < tokens).astype(np.float32)
    x = rng.normal(size=(1, tokens + padding, HIDDEN)).astype(np.float32)
    return {
        "x": torch.from_numpy(x),
        "routed_experts": torch.from_numpy(ids)[None],
        "mask": torch.from_numpy(mask)[None],
    }
