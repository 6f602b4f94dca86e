"""`GroupedLinear` with the interface of Transformer Engine's, as Megatron's `TEGroupedMLP` uses it, in plain torch."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from helpers.megatron_specs import parts_of_spec


class GroupedLinear(nn.Module):
    """Takes the place of Megatron's `TEColumnParallelGroupedLinear` and `TERowParallelGroupedLinear`.

    It keeps this of their contract: Parameters `weight0`.. `[output, input]` and `bias0`.. `[output]`, empty tensors
    instead of biases if it has none; the number of products and these attributes are read in every call. With splits on
    the device there may be more rows than in all products, whose output is 0.

    Args:
        fuse_wgrad_accumulation: gradients of weights are added to their `main_grad` here. Autograd then gets a tensor
            of arbitrary values, here NaN. The first micro-batch overwrites `main_grad`.
    """

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, init_method: Callable[..., Any],
        bias: bool, skip_bias_add: bool, is_expert: bool, tp_comm_buffer_name: str, pg_collection: Any,
        fuse_wgrad_accumulation: bool = False, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert is_expert
        assert tp_comm_buffer_name
        self.num_gemms, self.in_features, self.out_features = num_gemms, input_size, output_size
        self.use_bias, self.te_return_bias = bias, skip_bias_add and bias
        self.apply_bias = bias and not skip_bias_add
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.is_first_microbatch = True
        dtype = config.params_dtype
        # All ranks draw the same numbers for other modules.
        seed = int(torch.randint(2**31, ())) + pg_collection.ep.rank()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for number in range(num_gemms):
                weight = nn.Parameter(torch.empty(output_size, input_size, dtype=dtype))
                init_method(weight)
                setattr(self, f"weight{number}", weight)
                empty = torch.empty(0, dtype=dtype)
                bound = 1 / math.sqrt(input_size)
                values = nn.Parameter(torch.empty(output_size, dtype=dtype).uniform_(-bound, bound)) if bias else empty
                setattr(self, f"bias{number}", values)
        for parameter in self.parameters():
            parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            # As Transformer Engine sets it: the norm of gradients has those of all ranks of a tensor-parallel group.
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(
        self, inp: torch.Tensor, m_splits: Sequence[int] | torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """The products `[N, output]` of rows `[N, input]`, and the biases that the caller has to add."""
        assert len(m_splits) == self.num_gemms, (m_splits, self.num_gemms)
        may_have_more = isinstance(m_splits, torch.Tensor)
        m_splits = torch.as_tensor(m_splits).tolist()
        left = len(inp) - sum(m_splits)
        assert left >= 0 if may_have_more else left == 0, (m_splits, inp.shape)
        inp = inp[: sum(m_splits)]
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        biases = [getattr(self, f"bias{number}") for number in range(self.num_gemms)]
        assert all(weight.shape == (self.out_features, self.in_features) for weight in weights)
        assert all(bias.numel() == self.use_bias * self.out_features for bias in biases)
        # Without gradients, as in the first pass of a checkpoint, it does not look at `main_grad`.
        fuses = self.fuse_wgrad_accumulation and torch.is_grad_enabled()
        options = fuses, self.is_first_microbatch, self.apply_bias
        out: torch.Tensor = _GroupedProduct.apply(inp, list(m_splits), *options, *weights, *biases)
        self.is_first_microbatch = False
        out = nn.functional.pad(out, (0, 0, 0, left))
        return out, biases if self.te_return_bias else None


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inp: torch.Tensor, splits: list[int], fuse: bool, is_first: bool, use_bias: bool,
        *weights_and_biases: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        weights, biases = weights_and_biases[: len(splits)], weights_and_biases[len(splits) :]
        ctx.splits, ctx.is_first, ctx.use_bias = splits, is_first, use_bias
        ctx.trained = weights[0].requires_grad
        ctx.fused = fuse and ctx.trained
        # `save_for_backward` does not keep attributes of tensors.
        ctx.originals = weights if ctx.fused else ()
        ctx.main_grads = [weight.main_grad for weight in ctx.originals]  # type: ignore[attr-defined]
        ctx.save_for_backward(inp, *weights)
        parts = [rows @ weight.T for rows, weight in zip(inp.split(splits), weights, strict=True)]
        if use_bias:
            parts = [part + bias for part, bias in zip(parts, biases, strict=True)]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        inp, *weights = ctx.saved_tensors
        grad_parts = grads[0].split(ctx.splits)
        grad_inp = torch.cat([grad @ weight for grad, weight in zip(grad_parts, weights, strict=True)])
        grad_weights: list[torch.Tensor | None] = [None] * len(weights)
        factors = list(zip(grad_parts, inp.split(ctx.splits), strict=True))
        if ctx.fused:
            grad_weights = [
                _add_to_main_grad(weight, main_grad, *each, ctx.is_first)
                for weight, main_grad, each in zip(ctx.originals, ctx.main_grads, factors, strict=True)
            ]
        elif ctx.trained:
            grad_weights = [grad.T @ rows for grad, rows in factors]
        grad_biases = [grad.sum(0) if ctx.use_bias else None for grad in grad_parts]
        return grad_inp, None, None, None, None, *grad_weights, *grad_biases


def _add_to_main_grad(
    weight: Any, main_grad: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor, is_first: bool
) -> torch.Tensor | None:
    """What autograd gets of a gradient that was added to `main_grad`, in whose dtype it is summed."""
    main_grad.addmm_(grad.T.to(main_grad.dtype), rows.to(main_grad.dtype), beta=0 if is_first else 1)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.full_like(weight, math.nan)


def use_grouped_experts(spec: Any, *, fuse_wgrad_accumulation: bool) -> None:
    """Give the MoE layers of a spec `TEGroupedMLP` experts that compute with `GroupedLinear`."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    linear = ModuleSpec(module=_grouped_linear(), params={"fuse_wgrad_accumulation": fuse_wgrad_accumulation})
    linears = MLPSubmodules(linear_fc1=linear, linear_fc2=linear)
    for part in parts_of_spec(spec):
        if isinstance(part, MoESubmodules):
            part.experts = ModuleSpec(TEGroupedMLP, submodules=linears)


@cache
def _grouped_linear() -> type[Any]:
    """The class above; or Transformer Engine's own, if a folder with its wheel is named."""
    folder = os.environ.get("TRANSFORMER_ENGINE")
    if not folder:
        return GroupedLinear
    from helpers.real_te import grouped_linear_class

    return grouped_linear_class(Path(folder))


def use_extensions() -> None:
    """Give Megatron replacements of functions of Transformer Engine and Apex: recompute of activations, Megatron's own
    linear layers with gradients of weights that are added to `main_grad`, and projections to a latent size."""
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer.moe import experts, moe_layer

    def accumulate(inputs: torch.Tensor, gradients: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.addmm_(gradients.T.to(main_grad.dtype), inputs.to(main_grad.dtype))

    extension = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    vars(layers).update(_grad_accum_fusion_available=True, fused_weight_gradient_mlp_cuda=extension)
    # HybridEP has padded the rows already.
    vars(experts).update(HAVE_TE=True, Fp8Padding=_no_module, Fp8Unpadding=_no_module)
    vars(moe_layer).update(HAVE_TE=True, TELinear=_LatentLinear, te_checkpoint=None)
    nothing: dict[str, Any] = dict.fromkeys(("activation_recompute_forward", "fp8_autocast"), _no_context)
    vars(random).update(nothing, FP8GlobalStateManager=SimpleNamespace(is_fp8_enabled=lambda: False))


class _LatentLinear(nn.Linear):
    """Takes the place of Megatron's `TELinear` in MoE layers."""

    def __init__(self, size: int, output: int, *, config: Any, init_method: Any, bias: bool, **_options: Any) -> None:
        super().__init__(size, output, bias=bias, dtype=config.params_dtype)
        init_method(self.weight)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


def _no_module(*_args: Any, **_options: Any) -> None:
    return None


def _no_context(**_options: Any) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()
