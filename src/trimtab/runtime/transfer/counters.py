"""`Counters`: bytes of transfers, the time for which compute waited for them, and counts of special cases."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from trimtab.figures import by_key, measured, with_documented_figures
from trimtab.runtime.ranks.lockstep import Lockstep
from trimtab.runtime.ranks.recorder import WAITING, Recorder
from trimtab.runtime.transfer import streams
from trimtab.runtime.transfer.streams import Wait


@with_documented_figures
@dataclass(eq=False)
class Counters:
    """Counters of a rank since they were last cleared; their metrics are those of `Session.take_metrics`.

    `waits` are (start, end) events of waits on the device that are not in `waited_s` yet. Of `compared` recorded rows
    the router has chosen the expert of `agreeing`, too, which is on the device. `recorder` is the active one, or None;
    `lockstep` compares the ranks' logs while this rank waits on the host.
    """

    waited_s: float = measured(
        "for which compute waited for replicas or their gradients", "s", key="transfer/exposed_s", default=0.0
    )
    refresh_s: float = measured(
        "of copying changed weights to staging memory and mirrors", "s", key="transfer/refresh_s", default=0.0
    )
    peer_bytes: int = measured(
        "replica weights that this rank sent to others, or copied from other ranks' memory", "bytes",
        key="transfer/peer_bytes", default=0,
    )  # fmt: skip
    host_bytes: int = measured(
        "replica weights that this rank copied from its node's mirror", "bytes", key="transfer/host_bytes", default=0
    )
    mirror_bytes: int = measured(
        "weights that this rank sent to the mirrors of other nodes", "bytes", key="transfer/mirror_bytes", default=0
    )
    gradient_bytes: int = measured(
        "replica gradients that this rank sent to home ranks", "bytes", key="transfer/gradient_bytes", default=0
    )
    moved_bytes: int = measured(
        "rows of experts that this rank sent in renumberings", "bytes", key="transfer/moved_bytes", default=0
    )
    unplanned_micro_steps: int = measured(
        "micro-steps that ran without a plan", key="moe/unplanned_micro_steps", default=0
    )
    late_micro_steps: int = measured(
        "micro-steps that ran without replicas, since these were not planned yet", key="moe/late_micro_steps", default=0
    )
    planning_waited_s: float = measured(
        "for which micro-steps waited for their replicas to be planned", "s", key="plan/waited_s", default=0.0
    )
    live_calls: int = measured(
        "calls of layers outside of any micro-step, while there was a plan", key="moe/live_layer_calls", default=0
    )
    mixed_instances: int = measured(
        "planned instances with unknown rows, or with rows that may deviate: ranks exchange counts",
        key="moe/mixed_instances", default=0,
    )  # fmt: skip
    deviating_rows: int = measured(
        "rows of recorded tokens that were computed by other experts", key="moe/deviating_rows", default=0
    )
    abandoned_backwards: int = measured(
        "failed backwards through layers, whose replica gradients in transfer were dropped",
        key="moe/abandoned_backwards", default=0,
    )  # fmt: skip
    waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    agreeing: torch.Tensor | int = 0
    compared: int = 0
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

    def metrics(self) -> dict[str, float]:
        """All counters by the names of `Session.take_metrics`. On CUDA it waits for the device."""
        while self.waits:
            self.waits[0][1].synchronize()
            self._take_first()
        agreement = {"moe/replay_agreement": float(self.agreeing) / self.compared} if self.compared else {}
        return by_key(self) | agreement

    def clear(self) -> None:
        """Reset all counters."""
        vars(self).update(vars(Counters(recorder=self.recorder, lockstep=self.lockstep)))


def _all(waits: Sequence[Wait]) -> None:
    for wait in waits:
        wait()
