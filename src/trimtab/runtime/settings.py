"""`Settings`: the checked arguments of a session."""

from __future__ import annotations

import os
from typing import cast, get_args

from trimtab.cluster import ClusterSpec
from trimtab.runtime.argument_checks import at_least, finite, one_of
from trimtab.runtime.planning import Mode, Paths

# Environment variable: 1 turns on `verify_weights` where a session isn't told.
VERIFY_WEIGHTS = "TRIMTAB_VERIFY_WEIGHTS"


class Settings:
    """The arguments of `Session` that are not process groups; see there.

    Raises:
        InputError: if an argument is out of its range.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        mode: Mode,
        slots_per_rank: int,
        ring_layers: int,
        paths: Paths,
        mirror_bytes: int | None,
        least_gain: float,
        rates: ClusterSpec | None,
        verify_weights: bool | None,
    ) -> None:
        self.num_experts = at_least("num_experts", num_experts, 1)
        self.mode = mode
        self.paths = paths
        self.slots_per_rank = at_least("slots_per_rank", slots_per_rank, 0)
        self.ring_layers = at_least("ring_layers", ring_layers, 2)
        self.mirror_bytes = None if mirror_bytes is None else at_least("mirror_bytes", mirror_bytes, 0)
        self.least_gain = finite("least_gain", least_gain)
        self.rates = rates
        if verify_weights is None:
            verify_weights = mode == "shadow" or os.environ.get(VERIFY_WEIGHTS) == "1"
        self.verify_weights = verify_weights

    @property
    def mode(self) -> Mode:
        """What is done with a plan."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._mode = cast(Mode, one_of("mode", mode, get_args(Mode)))

    @property
    def paths(self) -> Paths:
        """How replicas' weights may come."""
        return self._paths

    @paths.setter
    def paths(self, paths: Paths) -> None:
        self._paths = cast(Paths, one_of("paths", paths, get_args(Paths)))

    @property
    def carries_out(self) -> bool:
        """Whether plans are carried out, not only reported."""
        return self.mode in ("plan", "static")

    @property
    def shared(self) -> dict[str, object]:
        """Settings that plans depend on, which must be equal on all ranks."""
        names = ("mode", "paths", "slots_per_rank", "ring_layers", "mirror_bytes", "least_gain")
        return {name: getattr(self, name) for name in names}
