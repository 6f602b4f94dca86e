"""`Counters`: bytes of transfers, the time for which compute waited for them, and counts of special cases."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from trimtab.runtime.ranks.lockstep import Lockstep
from trimtab.runtime.ranks.recorder import WAITING, Recorder
from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.streams import Wait


@dataclass(eq=False)
class Counters:
    """Counters of a rank since they were last cleared.

    Attributes:
        peer_bytes: replica weights that this rank sent to others, or copied from other ranks' memory.
        host_bytes: replica weights that this rank copied from its node's mirror.
        mirror_bytes: weights that this rank sent to the mirrors of other nodes.
        gradient_bytes: replica gradients that this rank sent to home ranks.
        moved_bytes: rows of experts that this rank sent to new homes.
        refresh_s: seconds of copying changed weights to staging memory and mirrors.
        waited_s: seconds for which compute waited for transfers.
        waits: (start, end) events of waits on the device that are not in `waited_s` yet.
        unplanned_micro_steps: micro-steps that ran without a plan.
        late_micro_steps: micro-steps that ran without replicas, since these were not planned yet.
        planning_waited_s: seconds for which micro-steps waited for their replicas to be planned.
        live_calls: calls of layers on live routing, outside of any micro-step, while there was a plan.
        mixed_instances: planned instances with unknown rows, or with rows that may deviate: ranks exchange counts.
        deviating_rows: rows of recorded tokens that the loop sent to other experts than the recorded ones.
        agreeing: recorded rows whose expert the router chose, too; on the device.
        compared: recorded rows that were compared with the router's choice.
        abandoned_backwards: failed backwards through layers; their replica gradients in transfer were dropped.
        recorder: the active Recorder, or None.
        lockstep: compares the ranks' logs while this rank waits on the host.
    """

    peer_bytes: int = 0
    host_bytes: int = 0
    mirror_bytes: int = 0
    gradient_bytes: int = 0
    moved_bytes: int = 0
    refresh_s: float = 0.0
    waited_s: float = 0.0
    waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    unplanned_micro_steps: int = 0
    late_micro_steps: int = 0
    planning_waited_s: float = 0.0
    live_calls: int = 0
    mixed_instances: int = 0
    deviating_rows: int = 0
    agreeing: torch.Tensor | int = 0
    compared: int = 0
    abandoned_backwards: int = 0
    recorder: Recorder | None = None
    lockstep: Lockstep | None = None

    def recorded(self, activity: int) -> AbstractContextManager[None]:
        """A context that records this activity, if a Recorder is active."""
        return nullcontext() if self.recorder is None else self.recorder.during(activity)

    def wait(self, waits: Sequence[Wait], device: torch.device) -> None:
        """Wait for transfers, and add the waiting time to the counters."""
        with self.recorded(WAITING):
            if streams.has_streams(device):
                self._wait_on_device(waits)
                return
            start = time.perf_counter()
            if self.lockstep is None:
                _all(waits)
            else:
                self.lockstep.wait(partial(_all, waits))
            self.waited_s += time.perf_counter() - start

    def _wait_on_device(self, waits: Sequence[Wait]) -> None:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        _all(waits)
        after.record()
        self.waits.append((before, after))
        # Events that have completed are added up now, so that their number is bounded.
        while self.waits[0][1].query() and len(self.waits) > 1:
            self._take_first()

    @property
    def exposed_s(self) -> float:
        """Seconds for which compute waited for transfers. On CUDA it waits for the device."""
        while self.waits:
            self.waits[0][1].synchronize()
            self._take_first()
        return self.waited_s

    def _take_first(self) -> None:
        start, end = self.waits.pop(0)
        self.waited_s += start.elapsed_time(end) / 1e3

    def compare_routing(
        self, live_NK: torch.Tensor, recorded_NK: torch.Tensor, compared_N: torch.Tensor | None, num_compared: int
    ) -> None:
        """Count the recorded experts that the router chose, too. The host does not wait.

        Args:
            live_NK, recorded_NK: `[n, K]` int64 ids.
            compared_N: `[n]` bool, the tokens that are counted; None for all.
            num_compared: their number.
        """
        with torch.inference_mode(False), torch.no_grad():
            agree_NKK = live_NK[:, :, None] == recorded_NK[:, None, :]
            if compared_N is not None:
                agree_NKK = agree_NKK & compared_N[:, None, None]
            self.agreeing = agree_NKK.sum() + self.agreeing
        self.compared += num_compared * live_NK.shape[1]

    @property
    def replay_agreement(self) -> float:
        """The part of recorded rows whose expert the router chose, too; NaN if none was compared. Waits for a GPU."""
        return float(self.agreeing) / self.compared if self.compared else float("nan")

    def metrics(self) -> dict[str, float]:
        """All counters, by the names of `Session.take_metrics`."""
        return {
            "transfer/exposed_s": self.exposed_s,
            "transfer/refresh_s": self.refresh_s,
            "transfer/peer_bytes": self.peer_bytes,
            "transfer/host_bytes": self.host_bytes,
            "transfer/mirror_bytes": self.mirror_bytes,
            "transfer/gradient_bytes": self.gradient_bytes,
            "transfer/moved_bytes": self.moved_bytes,
            "moe/unplanned_micro_steps": self.unplanned_micro_steps,
            "moe/late_micro_steps": self.late_micro_steps,
            "plan/waited_s": self.planning_waited_s,
            "moe/live_layer_calls": self.live_calls,
            "moe/mixed_instances": self.mixed_instances,
            "moe/deviating_rows": self.deviating_rows,
            **({"moe/replay_agreement": self.replay_agreement} if self.compared else {}),
            "moe/abandoned_backwards": self.abandoned_backwards,
        }

    def clear(self) -> None:
        """Reset all counters."""
        vars(self).update(vars(Counters(recorder=self.recorder, lockstep=self.lockstep)))


def _all(waits: Sequence[Wait]) -> None:
    for wait in waits:
        wait()
