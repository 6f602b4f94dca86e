"""Results of planned steps on a device whose compute is late too, and which uses freed memory again at once.

See `helpers.late_compute`. Mutants of the runtime show that a missing wait, or a missing `record_stream`, fails.
"""

from __future__ import annotations

import pytest
import torch

from helpers import late_device
from helpers.late_compute import PendingReadError
from helpers.late_device import LATE_COMPUTE
from helpers.programs import run_on_rank
from helpers.rank_pool import on_ranks
from trimtab.runtime.transfer.streams import BackgroundCopies

CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", LATE_COMPUTE)
def test_the_host_waits_for_values_and_may_not_read_memory_before(mode: str) -> None:
    with late_device.install(mode) as device:
        weight, rows = torch.nn.Parameter(torch.ones(3, 3)), torch.ones(2, 3)
        result = rows @ weight
        assert not device.compute.has_run(device.compute.length)
        with pytest.raises(PendingReadError, match=r"\[2, 3\]"):
            result.detach().numpy()
        target = torch.empty(2, 3)
        target.copy_(result.detach(), non_blocking=True)
        with pytest.raises(PendingReadError):
            target.numpy()
        assert result.sum().item() == 18
        assert target.numpy().tolist() == [[3.0] * 3] * 2
        result.sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [[2.0] * 3] * 3
        # Sizes that depend on values.
        assert (result > 2).nonzero().shape == (6, 2)


def test_freed_memory_is_used_again_at_once() -> None:
    """By compute in its order; a side stream keeps it only with `record_stream`."""
    for is_recorded in (False, True):
        with late_device.install("lazy") as device:
            side = torch.cuda.Stream()
            source = (torch.nn.Parameter(torch.ones(64)) * 2).detach()
            target = torch.zeros(64)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                target.copy_(source, non_blocking=True)
            if is_recorded:
                source.record_stream(side)
            address = source.data_ptr()
            del source
            other = torch.nn.Parameter(torch.ones(64)) * 5
            assert (other.data_ptr() == address) != is_recorded
            device.compute.synchronize()
            side.synchronize()
            assert target.tolist() == [2.0 if is_recorded else 5.0] * 64


@pytest.mark.parametrize("is_recorded", [True, False])
def test_uploads_that_nothing_waits_for_leave_later_tensors_alone(is_recorded: bool) -> None:
    with late_device.install("lazy") as device, pytest.MonkeyPatch.context() as patch:
        if not is_recorded:
            patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        BackgroundCopies(CPU).upload([torch.full((64,), 7.0)])
        later = torch.nn.Parameter(torch.ones(64)) * 5
        device.compute.synchronize()
        device.synchronize()
        assert (later == 5).all().item() == is_recorded


def test_copies_that_run_as_soon_as_they_may_change_nothing() -> None:
    """They may not run before compute has written what they read."""
    for seed in (2, 3):
        on_ranks(run_on_rank, (f"{seed}, between: renumber, recompute: first",), ranks=2, ways="thread early")
