"""Stage `synchronisation`: in a planned micro-step the host never waits for the device."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.calibration.random_experts import this_device
from trimtab.doctor.finding import Finding
from trimtab.doctor.planned_micro_step import PATHS, PlannedMicroStep, StepSizes

# Operations that read a value or a size from the device.
WAITING = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::_unique2")

TORCH = str(Path(torch.__file__).parent)


class WaitError(RuntimeError):
    """The host would wait for the device."""


class ForbidWaits(TorchDispatchMode):
    """Raises WaitError at an operation that would make the host wait, if its tensors were on a GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name in WAITING or (name == "aten::index" and any(_is_mask(index) for index in args[1])):
            raise WaitError(f"{name} reads a value from the device")
        return func(*args, **(kwargs or {}))


def _is_mask(index: torch.Tensor | None) -> bool:
    """Whether an index selects as many rows as it has true values."""
    return index is not None and index.dtype is torch.bool


@contextmanager
def forbidden_waits(device: torch.device) -> Iterator[None]:
    """A context in which an operation raises RuntimeError if the host would wait for the device."""
    if device.type != "cuda":
        with ForbidWaits():
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def find_wait(work: Callable[[], object], device: torch.device) -> str | None:
    """The first place in `work` where the host would wait for the device, and why; None if there is none."""
    try:
        with forbidden_waits(device):
            work()
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        # Below it are this file and torch.
        above = [frame for frame in frames if frame.filename != __file__ and not frame.filename.startswith(TORCH)]
        place = (above or frames)[-1]
        return f"{Path(place.filename).name}:{place.lineno}: {str(error).splitlines()[0]}"
    return None


def check_synchronisation() -> list[Finding]:
    """Run forward and backward of planned layers on each path, where waiting is an error."""
    device, ranks = this_device(), dist.get_world_size()
    sizes = StepSizes(hidden=64, width=32, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    torch.manual_seed(0)
    weights = [
        [torch.randn(shape, dtype=sizes.dtype, device=device) / 8 for shape in _shapes(sizes, ranks)]
        for _ in range(sizes.layers)
    ]
    hidden, target = torch.randn(2, sizes.tokens_per_rank, sizes.hidden, device=device).to(sizes.dtype)
    findings = []
    for path in PATHS if ranks > 1 else ("host",):
        step = PlannedMicroStep(sizes, path, weights)
        # Communicators and memory are made in the first run.
        step.run(hidden, target)
        with step.session.micro_step(0):
            found = find_wait(partial(step.forward_backward, hidden, target), device)
        name = f"{path} path"
        if found is None:
            findings.append(Finding(name, "ok", "no wait in forward and backward"))
        else:
            # A rank that stopped leaves others in the middle of a layer.
            return [*findings, Finding(name, "problem", f"the host waits in every planned layer: {found}")]
        step.session.close()
    return findings


def _shapes(sizes: StepSizes, ranks: int) -> tuple[tuple[int, ...], ...]:
    return (ranks * sizes.experts_per_rank, sizes.hidden), *sizes.shapes(sizes.experts_per_rank)
