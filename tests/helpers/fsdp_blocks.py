"""MoE blocks of torchtitan, AReaL, NeMo Automodel and prime-rl, from their own source, with experts in a `Session`.

FSDP_BLOCKS is a folder with the unpacked wheels `torchtitan`, `areal` and `nemo_automodel`, and with prime-rl's src as
`prime_rl`. What a framework needs beside `add_fsdp_layer` is its `adapt`.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from trimtab.integrations.fsdp import add_fsdp_layer
from trimtab.integrations.prime_rl import run_in_session
from trimtab.runtime import ExpertWeight, RowGroups, Session, grouped_linear

EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 16, 12
SOURCES = Path(os.environ.get("FSDP_BLOCKS", "none"))


@dataclass(frozen=True)
class Framework:
    """One framework.

    Attributes:
        folder: of its source in `SOURCES`.
        make: a block, of random weights.
        experts: those of a block.
        adapt: runs a block's experts in a session; called with the session, the FSDP module and the block.
        shards_layer: FSDP shards the whole block at once, with the experts' own mesh for these.
    """

    folder: str
    make: Callable[[], Any]
    experts: Callable[[Any], Any]
    adapt: Callable[[Session, Any, Any], object]
    shards_layer: bool = False


def _stub(name: str, **values: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(values)
    module.__path__ = []
    sys.modules[name] = module


def _packages(folder: str, *names: str) -> None:
    """Packages without what their own files import."""
    for name in names:
        _stub(name)
        sys.modules[name].__path__ = [str(SOURCES / folder / name.replace(".", "/"))]


def _local(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _counted(ids: torch.Tensor, bins: int, min: int, max: int) -> torch.Tensor:
    """`torch.histc`, which has no integers on a CPU."""
    return torch.bincount(ids.flatten().long(), minlength=bins)


# Arithmetic of experts, by layout of the weights.


def separate(weights: Sequence[ExpertWeight], rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """`w1, w2, w3 [E, out, in]`."""
    w1, w2, w3 = weights
    return grouped_linear(F.silu(grouped_linear(rows, w1, groups)) * grouped_linear(rows, w3, groups), w2, groups)


def packed(weights: Sequence[ExpertWeight], rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """`[E, in, gate | up]`, `[E, in, out]`."""
    both, down = weights
    gate, up = grouped_linear(rows, both, groups, transposed=True).chunk(2, dim=-1)
    return grouped_linear(F.silu(gate) * up, down, groups, transposed=True)


# torchtitan 0.3.0


def _make_titan() -> Any:
    sys.path.insert(0, str(SOURCES / "torchtitan"))
    anything = {name: mock.Mock() for name in ("combine_op", "dispatch_op", "init_buffer")}
    _stub("torchtitan.distributed.minimal_async_ep", MinimalAsyncEPDispatchMetadata=object, **anything)
    moe, dispatch, linear = (
        importlib.import_module(f"torchtitan.models.common.{name}") for name in ("moe", "token_dispatcher", "linear")
    )

    def loop(self: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """In float32; torchtitan's own rounds to bfloat16."""
        w1, w2, w3 = (_local(weight) for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        parts = x.split(counts.tolist())
        outputs = [
            F.linear(F.silu(F.linear(part, w1[e])) * F.linear(part, w3[e]), w2[e]) for e, part in enumerate(parts)
        ]
        return torch.cat(outputs)

    moe.GroupedExperts.forward = loop  # type: ignore[attr-defined]
    gate = linear.Linear.Config(in_features=HIDDEN, out_features=EXPERTS, bias=False)
    inner = moe.GroupedExperts.Config(dim=HIDDEN, hidden_dim=INNER, num_experts=EXPERTS)
    dispatcher = dispatch.LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
    router = moe.TokenChoiceTopKRouter.Config(
        num_experts=EXPERTS, gate=gate, top_k=TOP_K, score_func="softmax", route_norm=True
    )
    routed = moe.RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher)
    return moe.MoE.Config(num_experts=EXPERTS, load_balance_coeff=None, routed_experts=routed, router=router).build()


def _adapt_titan(session: Session, owner: Any, block: Any) -> None:
    experts, router, choose = block.routed_experts.inner_experts, block.router, block.router.forward
    layer = add_fsdp_layer(session, experts, ("w1_EFD", "w2_EDF", "w3_EFD"), separate, owner=owner)
    chosen: list[torch.Tensor] = []

    def route(x: torch.Tensor, bias: Any = None) -> Any:
        _, ids, scores = choose(x, bias)
        chosen[:] = [layer.route(ids.flatten(0, 1))]
        ids = chosen[0].view_as(ids)
        top = scores.gather(-1, ids)
        if router.route_norm:
            top = top / (top.sum(-1, keepdim=True) + 1e-20)
        return top * router.route_scale, ids, scores

    def run(x: torch.Tensor, weights: torch.Tensor, _ids: torch.Tensor, _counts: Any) -> torch.Tensor:
        return layer(x.flatten(0, 1), chosen[0], weights.flatten(0, 1)).view_as(x)

    router.forward, block.routed_experts.forward = route, run


# AReaL 1.0.4, archon engine


def _make_areal() -> Any:
    base = "areal.experimental.models.archon"
    _packages("areal", "areal", "areal.experimental", "areal.experimental.models", base)
    _stub(f"{base}.moe.kernels", generate_permute_indices=None)
    moe = importlib.import_module(f"{base}.moe")
    args = moe.MoEArgs(
        num_experts=EXPERTS, top_k=TOP_K, score_func="softmax", route_norm=True, score_before_experts=False,
        use_grouped_mm=False, load_balance_coeff=None,
    )  # fmt: skip
    block = moe.MoE(args, HIDDEN, INNER)
    block.init_buffers("cpu")
    return block


def _adapt_areal(session: Session, owner: Any, block: Any) -> None:
    block.experts.forward = layer = add_fsdp_layer(session, block.experts, ("w1", "w2", "w3"), separate, owner=owner)
    choose = block.router.forward

    def route(x: torch.Tensor, bias: Any = None) -> Any:
        ids = layer.route(choose(x, bias)[1])
        # The release has no replay.
        with mock.patch("torch.topk", lambda scores, k, **_: (scores.gather(-1, ids), ids)):
            return choose(x, bias)

    def forward(x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        scores, ids, _ = route(flat, block.expert_bias)
        return block.experts(flat, ids, scores).view_as(x)

    block.forward = forward


# NeMo Automodel 0.7.0


def _make_automodel() -> Any:
    folder, base = "nemo_automodel", "nemo_automodel.components"
    _packages(folder, "nemo_automodel", base, f"{base}.models")
    names = dict.fromkeys(("initialize_linear_module", "BackendConfig", "MoKBackendConfig"), object)
    _stub(f"{base}.models.common", **names)
    _stub(f"{base}.distributed")
    _stub(f"{base}.distributed.init_utils", get_world_size_safe=lambda: 1)
    sys.path.insert(0, str(SOURCES / folder))
    layers = importlib.import_module(f"{base}.moe.layers")
    config = importlib.import_module(f"{base}.moe.config").MoEConfig(
        n_routed_experts=EXPERTS, n_shared_experts=0, n_activated_experts=TOP_K, n_expert_groups=0, n_limited_groups=0,
        train_gate=True, gate_bias_update_factor=0.0, aux_loss_coeff=0.0, score_func="softmax", route_scale=1.0,
        dim=HIDDEN, inter_dim=INNER, moe_inter_dim=INNER, norm_topk_prob=True, softmax_before_topk=True,
        dtype=torch.float32, enable_routing_replay=True,
    )  # fmt: skip
    backend = _Backend()
    return layers.MoE(config, backend)


class _Backend:
    """Options of Automodel, all off but these."""

    dispatcher = experts = linear = "torch"
    gate_precision = None
    cuda_graph = types.SimpleNamespace(modules=())

    def __getattr__(self, name: str) -> bool:
        if name.startswith("__"):
            raise AttributeError(name)
        return False


def _adapt_automodel(session: Session, owner: Any, block: Any) -> None:
    layer = add_fsdp_layer(session, block.experts, ("gate_and_up_projs", "down_projs"), packed, owner=owner)
    block.experts.forward = lambda x, _mask, weights, ids: layer(x, ids, weights)
    replay = next(value for value in vars(block.gate).values() if type(value).__name__ == "RouterReplay")
    replay.apply = layer.route


# prime-rl 559b4477


def _make_prime() -> Any:
    _packages("prime_rl", "prime_rl", *(f"prime_rl.trainer{each}" for each in ("", ".models", ".models.layers")))
    _stub("prime_rl.configs")
    _stub("prime_rl.configs.trainer", EPCommBackend=str)
    _stub("torchtitan")
    _stub("torchtitan.distributed")
    _stub("torchtitan.distributed.expert_parallel", expert_parallel=lambda function: function)
    moe = importlib.import_module("prime_rl.trainer.models.layers.moe")
    args = moe.MoEArgs(
        num_experts=EXPERTS, num_shared_experts=1, score_func="softmax", route_norm=True, top_k=TOP_K,
        score_before_experts=False, use_grouped_mm=False, load_balance_coeff=None,
    )  # fmt: skip
    return moe.MoE(args, HIDDEN, INNER)


def _adapt_prime(session: Session, owner: Any, block: Any) -> None:
    run_in_session(session, block)


FRAMEWORKS = {
    "torchtitan": Framework(
        "torchtitan", _make_titan, lambda block: block.routed_experts.inner_experts, _adapt_titan, shards_layer=True
    ),
    "areal": Framework("areal", _make_areal, lambda block: block.experts, _adapt_areal),
    "automodel": Framework("nemo_automodel", _make_automodel, lambda block: block.experts, _adapt_automodel),
    "prime-rl": Framework("prime_rl", _make_prime, lambda block: block.experts, _adapt_prime),
}


class Net(nn.Module):
    """Blocks of a framework with linear layers between them."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in blocks)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for dense, block in zip(self.dense, self.blocks, strict=True):
            x = x + block(torch.tanh(dense(x)))
        return x.square().sum()


def make_net(framework: Framework, layers: int) -> Net:
    """The same on all ranks."""
    torch.histc = _counted  # type: ignore[assignment]
    torch.manual_seed(0)
    net = Net([framework.make() for _ in range(layers)])
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    return net
