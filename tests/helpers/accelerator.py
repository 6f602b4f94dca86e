"""`as_on_gpus`: any function of a rank, as it runs on a GPU.

`ways` is a text of words: `thread` runs backward on a thread of its own (`helpers.backward_thread`); a mode of
`helpers.late_device` runs work of the device late, with `peers` among ranks that read each other's memory; with
`queues` what the ranks issue runs on models of hardware queues (`helpers.hardware_queues`), too. The environment
variable AS_ON_GPUS has the ways of calls that have none of their own; `make test-backward-thread` sets it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from helpers import late_device
from helpers.backward_thread import backward_on_thread
from helpers.examples import examples
from helpers.hardware_queues import Work, blocked, recording

# As much as possible at a time.
LAZY = "thread lazy peers queues"
# Hardware queues, and kernels that run at a time.
QUEUES = examples(short=[(1, 1), (2, 1), (8, 2)], long=[*itertools.product(range(1, 9), (1, 2, 4))])

# Sessions that live longer than a call keep their device.
_device = cache(late_device.LateDevice)


@contextmanager
def as_on_gpus(ways: str, patched: str = "") -> Iterator[list[Work]]:
    """A context. Yields what is issued, if it is recorded.

    Args:
        patched: as of `shared_pool`.
    """
    words = set(ways.split())
    (mode,) = words & {*late_device.MODES, *late_device.LATE_COMPUTE} or [""]
    assert words <= {"thread", mode, "peers", "queues"}, ways
    with ExitStack() as stack:
        if mode and patched == "megatron":
            from helpers.megatron_runs import use_cpu_once

            # It replaces streams, too.
            use_cpu_once()
        if "thread" in words:
            stack.enter_context(backward_on_thread())
        works: list[Work] = []
        if mode:
            device = stack.enter_context(late_device.install(mode, peers="peers" in words, device=_device(mode)))
            if patched == "megatron":
                stack.enter_context(_megatron(device))
            if "queues" in words:
                works = stack.enter_context(recording(device)).works
        yield works


@contextmanager
def _megatron(device: late_device.LateDevice) -> Iterator[None]:
    """Megatron's own dispatcher waits for counts, and streams of another device are made anew."""
    from megatron.core.transformer.moe import token_dispatcher

    def move_to_cpu(tensor: Any, *, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        device.synchronize()
        with _disable_current_modes():
            values = tensor.detach().clone()
        return late_device.NUMPY(values) if as_numpy else values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", move_to_cpu)
        patch.setattr(token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None)
        yield


def check_queues(works_R: Sequence[Sequence[Work]]) -> None:
    """All that the ranks have issued ends on any number of hardware queues."""
    for connections, resident in QUEUES:
        assert not blocked(works_R, connections, resident), (connections, resident)
