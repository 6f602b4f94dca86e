"""Transformer Engine's own Python on a CPU, from its wheel. Its C extension is replaced; torch multiplies.

`make test-te` runs the tests of grouped experts with it. Only `GroupedLinear` works, without FP8.
"""

from __future__ import annotations

import enum
import importlib
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from helpers.absent_modules import AbsentModule, Anything

# What its Python refuses on a CPU, and what it says instead.
EDITS = (
    ("if not torch.cuda.is_available()", "if False"),
    ("if not inp.is_cuda", "if False"),
    ('device="cuda"', 'device="cpu"'),
)
EDITED = "pytorch/module", "pytorch/cpp_extensions"
PACKAGES = (
    "transformer_engine", "transformer_engine.common", "transformer_engine.debug", "transformer_engine.pytorch",
    "transformer_engine.pytorch.module", "transformer_engine.pytorch.attention",
)  # fmt: skip
# Their names are imported, and not used without FP8 and attention.
UNUSED = (
    "transformer_engine.pytorch.cpp_extensions.fused_attn", "transformer_engine.pytorch.triton",
    "transformer_engine.pytorch.triton.pad", "transformer_engine.pytorch.triton.grouped_dbias_dscales",
    "transformer_engine.pytorch.triton.mhc", "transformer_engine.pytorch.onnx_extensions",
)  # fmt: skip


def grouped_product(
    lefts: Sequence[torch.Tensor], is_left_turned: bool, rights: Sequence[torch.Tensor], is_right_turned: bool,
    outputs: Sequence[torch.Tensor], _dtype: Any, splits: Sequence[int], biases: Sequence[torch.Tensor],
    _bias_dtype: Any, is_one_output: bool, _gelu: Any, is_gradient: bool, _space: Any, _size: int, accumulates: bool,
    *_: Any,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """`te_general_grouped_gemm`: products in column order, as cuBLAS computes them, one for each expert."""
    parts = outputs[0].split([int(size) for size in splits]) if is_one_output else outputs
    for number, (left, right, output) in enumerate(zip(lefts, rights, parts, strict=False)):
        has_bias = bool(biases) and biases[number].numel() > 0
        if is_gradient and has_bias:
            biases[number].copy_(right.sum(0))
        if not left.numel() or not right.numel():
            if not accumulates:
                output.zero_()
            continue
        one, other = right.t() if is_right_turned else right, left.t() if is_left_turned else left
        product = one.to(output.dtype) @ other.to(output.dtype)
        if has_bias and not is_gradient:
            product = product + biases[number]
        if accumulates:
            output.add_(product)
        else:
            output.copy_(product)
    return biases


def load_grouped_linear(folder: Path) -> Any:
    """The module with the wheel's `GroupedLinear`. Once in a process.

    Args:
        folder: where the wheel was unpacked.
    """
    root = _edited(folder)
    sys.path.insert(0, str(root))
    cuda: Any = torch.cuda
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132, major=9, minor=0, name="H100")
    constants = (root / "transformer_engine/pytorch/constants.py").read_text()
    members = re.findall(r"^    (k\w+) = (?:int\()?(?:tex\.DType\.\w+|(\d+))", constants, re.M)
    extension: Any = AbsentModule("transformer_engine_torch")
    extension.te_general_grouped_gemm = grouped_product
    extension.get_cublasLt_version = lambda: 120900
    extension.get_num_cublas_streams = lambda: 4
    make_enum: Any = enum.IntEnum
    extension.DType = make_enum("DType", {name: int(value or place) for place, (name, value) in enumerate(members)})
    sys.modules["transformer_engine_torch"] = extension
    for name in PACKAGES:
        # Not their own __init__, which loads the core library.
        package = ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)
    for name in UNUSED:
        unused: Any = AbsentModule(name)
        unused.__path__, unused.__all__ = [], []
        sys.modules[name] = unused
    common: Any = sys.modules["transformer_engine.common"]
    common.load_framework_extension = lambda *_: None
    common.__getattr__ = lambda name: Anything() if not name.startswith("__") else _missing(name)
    found = importlib.import_module("transformer_engine.pytorch.module.grouped_linear")
    for name in ("constants", "cpp_extensions.gemm"):
        module: Any = importlib.import_module(f"transformer_engine.pytorch.{name}")
        module.TE_DType[torch.float64] = module.TE_DType[torch.float32]
    return found


def _missing(name: str) -> Any:
    raise AttributeError(name)


def _edited(folder: Path) -> Path:
    """A copy of the package that accepts tensors on the CPU."""
    copied = Path(tempfile.mkdtemp(prefix="trimtab-te-"))
    shutil.copytree(folder / "transformer_engine", copied / "transformer_engine")
    for file in (file for part in EDITED for file in (copied / "transformer_engine" / part).glob("*.py")):
        text = file.read_text()
        for before, after in EDITS:
            text = text.replace(before, after)
        file.write_text(text)
    return copied


def grouped_linear_class(folder: Path) -> type[Any]:
    """The wheel's `GroupedLinear`, wrapped as Megatron's `TEGroupedLinear` wraps it, on the CPU."""
    base: Any = load_grouped_linear(folder).GroupedLinear

    class RealGroupedLinear(base):  # type: ignore[misc]
        def __init__(
            self, num_gemms: int, input_size: int, output_size: int, *, config: Any, init_method: Callable[..., Any],
            bias: bool, skip_bias_add: bool, is_expert: bool, tp_comm_buffer_name: str, pg_collection: Any,
            fuse_wgrad_accumulation: bool = False,
        ) -> None:  # fmt: skip
            del is_expert, tp_comm_buffer_name
            super().__init__(
                num_gemms=num_gemms, in_features=input_size, out_features=output_size, sequence_parallel=False,
                fuse_wgrad_accumulation=fuse_wgrad_accumulation, tp_group=None, tp_size=1, get_rng_state_tracker=None,
                init_method=lambda _: None, bias=bias, return_bias=skip_bias_add and bias, parallel_mode=None,
                params_dtype=config.params_dtype, device="cpu",
            )  # fmt: skip
            self.te_return_bias = skip_bias_add and bias
            self.is_first_microbatch = True
            # All ranks draw the same numbers for other modules.
            seed = int(torch.randint(2**31, ())) + pg_collection.ep.rank()
            bound = 1 / math.sqrt(input_size)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(seed)
                for number in range(num_gemms):
                    init_method(getattr(self, f"weight{number}"))
                    if bias:
                        getattr(self, f"bias{number}").uniform_(-bound, bound)
            for parameter in self.parameters():
                parameter.allreduce = config.expert_model_parallel_size == 1

        def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> Any:
            found = super().forward(inp, m_splits, is_first_microbatch=self.is_first_microbatch)
            self.is_first_microbatch = False
            return found if self.te_return_bias else (found, None)

    return RealGroupedLinear
