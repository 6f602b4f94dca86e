"""What a router of Megatron has of each expert."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

BY_EXPERT = ("weight", "bias", "expert_bias", "local_tokens_per_expert", "global_tokens_per_expert")
"""Parameters and buffers `[E, ...]` of Megatron's `TopKRouter`."""
OTHERS = ("ga_steps",)


def is_known(router: nn.Module) -> bool:
    """Whether all that a router has is known to be by expert or not. Routers of forks may have more."""
    return _named(router).keys() <= {*BY_EXPERT, *OTHERS}


def tensors_by_expert(router: nn.Module) -> list[torch.Tensor]:
    """The tensors by expert, and whole copies of them that an optimizer updates in float32."""
    named = _named(router)
    tensors = [named[name] for name in BY_EXPERT if name in named]
    # Not the parts of a distributed optimizer, see `MegatronState`.
    main: list[Any] = [
        getattr(tensor, "main_param", None) for tensor in tensors if not getattr(tensor, "main_param_sharded", False)
    ]
    return tensors + [each for each in main if each is not None]


def _named(router: nn.Module) -> dict[str, torch.Tensor]:
    return dict(itertools.chain(router.named_parameters(), router.named_buffers()))
