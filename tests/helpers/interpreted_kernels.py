"""`triton_kernels` on CPU tensors, run by Triton's interpreter."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch


@cache
def interpreted_kernels() -> ModuleType:
    """The module, with Triton imported once more: functions that were compiled before can't be interpreted.

    Only for processes that run nothing else. The interpreter truncates to bfloat16, which is repaired here.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    kernels = import_module("trimtab.runtime.program.triton_kernels")
    interpreter: Any = import_module("triton.runtime.interpreter")
    truncate = interpreter.InterpreterBuilder.create_fp_trunc

    def round_to_nearest(builder: Any, source: Any, dtype: Any) -> Any:
        if dtype.scalar != interpreter.tl.bfloat16:
            return truncate(builder, source, dtype)
        rounded = torch.from_numpy(source.data.copy()).to(torch.bfloat16)
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), dtype.scalar)

    interpreter.InterpreterBuilder.create_fp_trunc = round_to_nearest
    return kernels
