"""Comparisons of Megatron runs with replacements of libraries that need a GPU, on 2 ranks."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from helpers.fake_deep_ep import use_deep_ep
from helpers.fake_te import use_extensions
from helpers.megatron_runs import Layout, MegatronCase, Model, compare_runs, use_layout
from trimtab.errors import InputError
from trimtab.integrations.megatron.on_cpu import use_cpu
from trimtab.runtime.state.home_experts import HomeExperts, parameters_of
from trimtab.runtime.transfer.returns import GradientReturns

LAYOUT = Layout(ranks=2, expert=2)


def use_fakes(_state: dict[str, Any]) -> None:
    """Prepare a rank. Call it before the other functions of a test."""
    _replace_libraries()
    use_layout(LAYOUT)


@cache
def _replace_libraries() -> None:
    use_cpu()
    use_deep_ep()
    use_extensions()


def compare_with_fakes(_state: dict[str, Any], case: MegatronCase) -> float:
    """The worst relative difference."""
    return compare_runs(LAYOUT, [case])[0]


def compare_by_autograd(_state: dict[str, Any], case: MegatronCase) -> float:
    """The same, with gradients of replicas returned to autograd and not added to `main_grad`."""
    with mock.patch.object(GradientReturns, "join_parameters", _return_to_autograd):
        return compare_runs(LAYOUT, [case])[0]


def _return_to_autograd(returns: Any, layer: HomeExperts) -> list[torch.Tensor | None]:
    """Replaces `join_parameters`."""
    tensors = zip(layer.tensors, layer.are_trained, strict=True)
    trained = [parameters_of(tensor) for tensor, is_trained in tensors if is_trained]
    added: dict[torch.nn.Parameter, torch.Tensor] = {}
    for row, totals in returns._arrived(returns._take(layer)):
        for parameters, total in zip(trained, totals, strict=True):
            added[parameters[row]] = total.to(parameters[row].dtype, copy=True)
    return [added.get(parameter) for parameter in layer.trained]


def hybrid_buffer(_state: dict[str, Any]) -> tuple[set[int], int]:
    """The numbers of local experts for which Megatron's only HybridEP buffer has compiled kernels, and how often it was
    enlarged."""
    from megatron.core.transformer.moe import fused_a2a

    buffer: Any = fused_a2a._hybrid_ep_buffer
    return buffer.compiled, buffer.enlarged


def deepep_experts_of_weights_0(_state: dict[str, Any]) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """Physical experts of 3 tokens, and the experts and weights that DeepEP gets if some weights are 0."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from trimtab.integrations.megatron.physical_dispatch import MegatronRows, physical_dispatcher

    layer = next(Model(LAYOUT, MegatronCase(flex="deepep")).moe_layers())
    physical = physical_dispatcher(layer, 2, (0, 1), get_default_pg_collection())
    ids = torch.tensor([[11, 4], [5, 8], [10, 9]], dtype=torch.uint16)
    weights = torch.tensor([[0.0, 1.0], [0.3, 0.7], [0.0, 0.0]])
    instance: Any = SimpleNamespace(layout=SimpleNamespace(physical_ids=ids))
    MegatronRows.start(physical, torch.zeros(3, 1, 16), weights, instance)
    manager: Any = physical._comm_manager  # type: ignore[union-attr]
    return ids.tolist(), manager.token_indices.tolist(), manager.token_probs.tolist()


def refusals(_state: dict[str, Any]) -> dict[str, str]:
    """Messages for what can't be balanced."""
    from megatron.core.transformer.moe.experts import GroupedMLP

    from trimtab.integrations.megatron import balance

    def message(case: MegatronCase, change: Any = None, slots: int = 2) -> str:
        model = Model(LAYOUT, case)
        if change is not None:
            change(next(model.moe_layers()))
        try:
            balance(model.chunks, slots_per_rank=slots)
        except InputError as error:
            return str(error)
        return ""

    def backend(layer: Any) -> None:
        layer.config.moe_flex_dispatcher_backend = "ncclep"

    def fused(layer: Any) -> None:
        layer.experts._with_fused_impl = True

    def single(layer: Any) -> None:
        layer.experts.linear_fc1.weight0 = None

    def legacy(layer: Any) -> None:
        layer.experts.__class__ = GroupedMLP

    grouped, hybridep = MegatronCase(grouped=True), MegatronCase(flex="hybridep")
    return {
        "backend": message(MegatronCase(flex="deepep"), backend),
        "fused": message(grouped, fused),
        "single": message(grouped, single),
        "legacy": message(grouped, legacy),
        "slots": message(hybridep, slots=1),
    }
