"""Megatron-core on CPU ranks over gloo: replaces the CUDA calls that it makes on every machine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class _NoStream:
    """A CUDA stream or event on a machine without CUDA: everything has run already."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_options: _NoStream()


# Functions that create tensors. Megatron gives them "cuda" as their device, and pinned memory.
_CREATES = (
    "arange", "as_tensor", "empty", "empty_like", "full", "full_like", "ones", "ones_like", "rand", "randint", "randn",
    "tensor", "zeros", "zeros_like",
)  # fmt: skip


def _on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(create)
    def create_on_cpu(*args: Any, **options: Any) -> torch.Tensor:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        if options.get("pin_memory"):
            options["pin_memory"] = False
        return create(*args, **options)

    return create_on_cpu


def use_cpu() -> None:
    """Call it in a rank's process before any model is built. For tests, examples and benchmarks."""
    cuda: Any = torch.cuda
    same = {"current_device": torch.device("cpu"), "synchronize": None, "set_device": None, "_lazy_init": None}
    for name, value in same.items():
        setattr(cuda, name, lambda *_args, value=value: value)
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = _NoStream
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_args, **_options: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_args, **_options: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    # Setting of CUDA's random state. Torch would queue the calls until CUDA starts.
    megatron_random: Any = random
    megatron_random._lazy_call = lambda _call: None
    cuda.default_generators = (torch.default_generator,)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_args: None
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_args, **_options: self
    tensor.record_stream = lambda _self, _stream: None
    tensor.type = _type_on_cuda
    for name in _CREATES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    norm: Any = WrappedTorchNorm
    norm.__new__ = staticmethod(_norm)
    modules: Any = moe_utils, token_dispatcher
    if not hasattr(modules[0], "te_general_gemm"):
        modules[0].te_general_gemm = None
    modules[1].maybe_move_tensor_to_cpu = _move_to_cpu
    # Its classes are those of Transformer Engine.
    vars(multi_token_prediction)["is_inference_column_parallel_linear"] = lambda _module: False


def _norm(_class: type, config: Any, hidden_size: int, eps: float = 1e-5, **_options: Any) -> torch.nn.LayerNorm:
    """LayerNorm, also with sequence parallelism, which Megatron leaves to Transformer Engine and Apex."""
    norm = torch.nn.LayerNorm(hidden_size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


_type = torch.Tensor.type


def _type_on_cuda(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """`Tensor.type`; names are those of CUDA tensors, which Megatron's optimizers ask for."""
    found = _type(tensor, *args, **options)
    return f"torch.cuda.{found.rpartition('.')[2]}" if isinstance(found, str) else found


def _move_to_cpu(tensor: Any, *, as_numpy: bool = False, record_stream: bool = False) -> Any:
    del record_stream
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
