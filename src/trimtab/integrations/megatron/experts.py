"""Megatron's modules of experts: their Parameters by expert, and copies of them that compute with replicas' weights."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import nn

from trimtab.runtime.layer.framework_layer import Replicas

LINEARS = ("linear_fc1", "linear_fc2")


class Experts(Protocol):
    """The experts of one MoE layer on this rank."""

    def tensors(self) -> list[list[nn.Parameter]]:
        """The Parameters of the home experts: one list for each tensor of an expert, in the order of experts."""
        ...

    def compute(
        self, rows: torch.Tensor, counts: Sequence[int], probs: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]]
    ) -> torch.Tensor:
        """Outputs `[N, H]` of replicas alone.

        Args:
            rows: `[N, H]`, grouped by replica.
            counts: rows of each replica.
            probs: `[N]`, the router's weights.
            tensors: for each tensor of an expert those of the replicas, in the graph.
        """
        ...


def experts_of(module: nn.Module) -> Experts | None:
    """The experts of a MoE layer's module; None if modules of this kind can't be balanced."""
    if type(module) is SequentialMLP:
        return SequentialExperts(module)
    if type(module) is TEGroupedMLP and GroupedExperts.computes(module):
        return GroupedExperts(module)
    return None


class SequentialExperts:
    """`SequentialMLP`: one MLP for each expert."""

    def __init__(self, module: SequentialMLP) -> None:
        self._module = module
        self._names = [
            (linear, name)
            for linear in LINEARS
            for name in ("weight", "bias")
            if isinstance(getattr(getattr(module.local_experts[0], linear), name, None), nn.Parameter)
        ]

    def tensors(self) -> list[list[nn.Parameter]]:
        """See `Experts`."""
        mlps: Any = self._module.local_experts._modules.values()
        return [[_parameters(mlp._modules[linear], (name,))[0] for mlp in mlps] for linear, name in self._names]

    def compute(
        self, rows: torch.Tensor, counts: Sequence[int], probs: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]]
    ) -> torch.Tensor:
        """See `Experts`."""
        mlp = _without_parameters(self._module.local_experts[0])
        outputs = []
        for number, (part, weights) in enumerate(zip(rows.split(list(counts)), probs.split(list(counts)), strict=True)):
            for (linear, name), values in zip(self._names, tensors, strict=True):
                setattr(getattr(mlp, linear), name, values[number])
            outputs.append(mlp(part, weights)[0])
        return torch.cat(outputs)


class GroupedExperts:
    """`TEGroupedMLP`: two grouped products of Transformer Engine, with one Parameter for each expert.

    Tested with a replacement of Transformer Engine's `GroupedLinear` on a CPU; ran with Transformer Engine 2.20.2 on a
    GPU.
    """

    @staticmethod
    def computes(module: TEGroupedMLP) -> bool:
        """Whether each expert has its own Parameters, and they are read in every call. Newer versions of Megatron have
        options for one Parameter of all experts, and for fused operations that keep them."""
        has_own = isinstance(getattr(module.linear_fc1, "weight0", None), nn.Parameter)
        return has_own and not getattr(module, "_with_fused_impl", False)

    def __init__(self, module: TEGroupedMLP) -> None:
        self._module = module
        self._names = [
            (linear, name)
            for linear in LINEARS
            for name in ("weight", "bias")
            if isinstance(getattr(getattr(module, linear), f"{name}0", None), nn.Parameter)
        ]
        self._names_of_experts = [
            (linear, [f"{name}{expert}" for expert in range(module.num_local_experts)]) for linear, name in self._names
        ]

    def tensors(self) -> list[list[nn.Parameter]]:
        """See `Experts`."""
        modules: Any = self._module._modules
        return [_parameters(modules[linear], names) for linear, names in self._names_of_experts]

    def compute(
        self, rows: torch.Tensor, counts: Sequence[int], probs: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]]
    ) -> torch.Tensor:
        """See `Experts`."""
        module = _without_parameters(self._module)
        module.num_local_experts = len(counts)
        for linear in LINEARS:
            product = getattr(module, linear)
            product.num_gemms = len(counts)
            for number in range(len(counts)):
                # Without biases Transformer Engine keeps empty tensors in their place.
                setattr(product, f"bias{number}", rows.new_empty(0))
        for (linear, name), tensor in zip(self._names, tensors, strict=True):
            for number, values in enumerate(tensor):
                setattr(getattr(module, linear), f"{name}{number}", values)
        output: torch.Tensor = module(rows, torch.tensor(counts), probs)[0]
        return output

    @contextmanager
    def joined(self, replicas: Replicas) -> Iterator[None]:
        """A context in which the module computes replicas, too, after its own experts, in the same products.

        Products that add gradients of weights to a `main_grad` do so for replicas, in memory that is sent home.
        """
        homes, count = self._module.num_local_experts, replicas.count
        memory: Sequence[torch.Tensor | None] = [None] * len(self._names)
        if torch.is_grad_enabled():
            memory = replicas.gradient_memory([self._main_grad_dtype(*names) for names in self._names])
        products = [vars(self._module)["_modules"][linear] for linear in LINEARS]
        names = [f"{name}{number}" for name in ("weight", "bias") for number in range(homes, homes + count)]
        try:
            for product in products:
                product.num_gemms = homes + count
                # Without biases Transformer Engine keeps empty tensors in their place.
                vars(product).update(dict.fromkeys(names[count:], replicas.tensors[0][0].new_empty(0)))
            for (linear, name), tensors, main_grads in zip(self._names, replicas.tensors, memory, strict=True):
                for number, tensor in enumerate(tensors):
                    if main_grads is not None:
                        tensor.main_grad = main_grads[number]  # type: ignore[attr-defined]
                    vars(getattr(self._module, linear))[f"{name}{homes + number}"] = tensor
            yield
        finally:
            for product in products:
                product.num_gemms = homes
                for name in names:
                    vars(product).pop(name, None)

    def _main_grad_dtype(self, linear: str, name: str) -> torch.dtype | None:
        """The dtype in which a product adds gradients to a `main_grad`; None if autograd gets them."""
        product = getattr(self._module, linear)
        first = getattr(product, f"{name}0")
        if name != "weight" or not first.requires_grad or not getattr(product, "fuse_wgrad_accumulation", False):
            return None
        dtype: torch.dtype = first.main_grad.dtype
        return dtype


def _parameters(module: Any, names: Sequence[str]) -> list[nn.Parameter]:
    """Parameters of a module. Attributes are slow in `nn.Module`, and many hundred are read in every micro-step."""
    own: dict[str, nn.Parameter] = module._parameters
    try:
        return [own[name] for name in names]
    except KeyError:  # Parametrized ones are computed.
        return [getattr(module, name) for name in names]


def _without_parameters(module: nn.Module) -> Any:
    """A copy of a module without its Parameters and hooks, also in the modules inside; all else is shared.

    Gradients of its weights are autograd's: they are not added to a `main_grad` by the matrix product.
    """
    copied = copy.copy(module)
    # `copy.deepcopy` fails on process groups.
    copied.__dict__ = dict(module.__dict__)
    copied._parameters = {name: None for name, parameter in module._parameters.items() if parameter is None}
    copied._modules = {name: child and _without_parameters(child) for name, child in module._modules.items()}
    copied.__dict__.pop("forward", None)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        setattr(copied, hooks, OrderedDict())
    for fused in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):
        if hasattr(copied, fused):
            setattr(copied, fused, False)
    return copied
