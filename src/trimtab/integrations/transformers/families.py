"""MoE blocks of Hugging Face models, in the one form that transformers gives most families.

A block has a router, which returns `(logits [T, E], weights [T, K], ids [T, K])` and chooses by a `topk` over the
scores of all experts; and `experts` of `use_experts_implementation`, which have packed tensors `[E, ...]` and are
called with hidden states, ids and weights. Shared experts and dense layers are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trimtab.errors import InputError
from trimtab.runtime import ExpertWeight, RowGroups, grouped_bias, grouped_linear
from trimtab.runtime.program.grouped_products import ApplyExperts

SUPPORTED_MODEL_TYPES = (
    "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "afmoe", "aria_text", "axk2", "bailing_hybrid",
    "beam", "cohere2_moe", "deepseek_v2", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint",
    "glm4_moe_lite", "glm_moe_dsa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling2", "inkling2_loop", "kimi_linear", "kolibri1", "laguna", "lara_mini",
    "mellum", "minimax", "minimax_m2", "minimax_m3_vl_text", "mistral4", "mistral_large4_text", "nemotron_h", "olmoe",
    "openai_privacy_filter", "qwen2_moe", "qwen3_5_moe_text", "qwen3_next", "qwen3_vl_moe_text", "solar_open",
)  # fmt: skip
"""Of which a small model is compared with transformers; others of the same form run, too."""
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
_TOP_KS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")

Choose = Callable[[torch.Tensor], torch.Tensor]
"""From the ids `[T, K]` int64 that a router would choose to those that it shall return."""


def num_experts(config: Any) -> int:
    """Number of routed experts of an MoE layer, E. Raises InputError if the config does not name it."""
    return _number(config, _COUNTS)


def top_k(config: Any) -> int:
    """Experts that a token uses, K. Raises InputError if the config does not name it."""
    return _number(config, _TOP_KS)


def _number(config: Any, names: Sequence[str]) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in names:
        if isinstance(value := getattr(text, name, None), int):
            return value
    raise InputError(f"the config of this {_model_type(config)} model has none of {', '.join(names)}")


def _model_type(config: Any) -> str:
    return str(getattr(config, "model_type", type(config).__name__))


def moe_blocks(model: Any) -> dict[int, Any]:
    """The model's MoE blocks (modules with a router and `experts`), by decoder layer.

    `model` may be a whole model, its decoder, or a wrapper of either with a `config`.

    Raises:
        InputError: if no layer of the model is a MoE layer, or one is of another form.
    """
    blocks = _blocks_of(decoder_of(model))
    for index, block in blocks.items():
        if not hasattr(block.experts, "is_transposed"):
            raise InputError(
                f"decoder layer {index}: {type(block.experts).__name__} of model type {_model_type(model.config)!r} "
                "are not of the form that is supported: packed tensors of transformers' use_experts_implementation, "
                "without adapters"
            )
    return blocks


def decoder_of(model: Any) -> Any:
    """The module that runs the decoder layers, which are its `layers`: the model itself, or a part of it.

    Raises:
        InputError: if no layer of the model is a MoE layer.
    """
    for module in model.modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and _blocks_of(module):
            return module
    raise InputError(f"this {_model_type(model.config)} model has no MoE layer: a router beside experts")


def _blocks_of(decoder: Any) -> dict[int, Any]:
    found = {}
    for index, layer in enumerate(decoder.layers):
        for block in layer.modules():
            if isinstance(getattr(block, "experts", None), nn.Module) and isinstance(_router(block), nn.Module):
                found[index] = block
                break
    return found


def _router(block: Any) -> Any:
    return next((getattr(block, name) for name in ("gate", "router") if hasattr(block, name)), None)


def router_of(block: Any) -> nn.Module:
    """The router of a block of `moe_blocks`."""
    router: nn.Module = _router(block)
    return router


def expert_tensors(experts: Any) -> tuple[str, ...]:
    """Names of the tensors of a block's experts, in the order that `expert_products` takes them.

    Raises:
        InputError: if they have others.
    """
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    names = (first, f"{first}_bias", "down_proj", "down_proj_bias") if experts.has_bias else (first, "down_proj")
    held = dict(experts.named_parameters())
    if set(held) != set(names) or getattr(experts, "has_post_expert_norm", False):
        raise InputError(
            f"{type(experts).__name__} hold {', '.join(held) or 'no parameters'}; a session needs plain "
            f"{', '.join(names)}, so merge adapters on experts or put them on other modules, and load the model "
            "unquantized"
        )
    return names


def expert_products(experts: Any) -> ApplyExperts:
    """The function that computes a block's experts, with the module's own activation and gate."""

    def apply(weights: Sequence[ExpertWeight], rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        def product(rows: torch.Tensor, weight: ExpertWeight, *bias: ExpertWeight) -> torch.Tensor:
            rows = grouped_linear(rows, weight, groups, transposed=experts.is_transposed)
            return grouped_bias(rows, bias[0], groups) if bias else rows

        first, second = (weights[: len(weights) // 2], weights[len(weights) // 2 :])
        inner = product(rows, *first)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        return product(inner, *second)

    return apply


def choose_experts(router: nn.Module, config: Any, choose: Choose) -> Callable[[], None]:
    """Let a router return other ids, with its own weights for them, until the returned function is called.

    Args:
        config: of the model.
        choose: called in every forward of the router, with the ids of those that were given before, if any.

    Raises:
        InputError: in a forward, if the router does not return the ids of its `topk` over all experts.
    """
    before = vars(router).get("forward")
    if isinstance(before, _Chooser):
        router.forward = _Chooser(before.forward, (*before.choices, choose), before.size)
    else:
        router.forward = _Chooser(router.forward, (choose,), (num_experts(config), top_k(config)))

    def restore() -> None:
        if before is None:
            del router.forward
        else:
            router.forward = before

    return restore


class _Chooser:
    """Replaces a router's `forward`. A copy of the model has a copy of it, of the copied router."""

    def __init__(self, forward: Callable[..., Any], choices: Sequence[Choose], size: tuple[int, int]) -> None:
        self.forward, self.choices, self.size = forward, choices, size

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with _Choice(self.choices, self.size) as choice:
            output = self.forward(*arguments, **named)
        ids = output[2] if isinstance(output, tuple) and len(output) == 3 else None
        if choice.ids is None or ids is None or ids.data_ptr() != choice.ids.data_ptr():
            name = type(getattr(self.forward, "__self__", self.forward)).__name__
            raise InputError(
                f"{name} does not return (logits, weights, ids) with the ids of one topk over its {self.size[0]} "
                "experts, so its routing can't be replayed"
            )
        return output


class _Choice(TorchFunctionMode):
    """While it is entered, the `topk` of K of `[T, E]` scores returns the ids that the last choice gives."""

    def __init__(self, choices: Sequence[Choose], size: tuple[int, int]) -> None:
        super().__init__()
        self._choices, self._size = choices, size
        self.ids: torch.Tensor | None = None
        # What a group-limited router masks before it chooses: other experts than those of its groups have weights, too.
        self._unmasked: tuple[torch.Tensor, torch.Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.masked_fill and args[0].ndim == 2 and args[0].shape[-1] == self._size[0]:
            self._unmasked = args[0], result
        if func in (torch.topk, torch.Tensor.topk):
            scores = args[0] if args else (kwargs or {})["input"]
            if scores.ndim == 2 and (scores.shape[-1], result.indices.shape[-1]) == self._size:
                self.ids = result.indices
                for choose in self._choices:
                    self.ids = choose(self.ids)
                if self._unmasked is not None and self._unmasked[1] is scores:
                    scores = self._unmasked[0]
                return torch.return_types.topk((scores.gather(-1, self.ids), self.ids))
        return result
