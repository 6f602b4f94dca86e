"""Lower bound of the number of replicas of an instance, at which the search stops."""

from __future__ import annotations

import numpy as np

from trimtab.kernels import kernel


@kernel
def fewest_replicas_bound(instance, loads_R, threshold_load):  # type: ignore[no-untyped-def]
    """For every rank, the number of its largest experts that together have its excess.

    Args:
        instance: an `InstanceRows`.
        loads_R: `[R]` int64 rows of every rank without replicas.
        threshold_load: load that no rank should exceed, rows.
    """
    counts_E, starts_R, experts_by_home = instance.counts_E, instance.homes.starts_R, instance.homes.experts_by_home
    needed = 0
    for r in range(len(loads_R)):
        excess = loads_R[r] - threshold_load
        smaller_than = np.int64(1) << 62
        while excess > 0:
            largest = np.int64(0)
            equal = 0
            for i in range(starts_R[r], starts_R[r + 1]):
                tokens = counts_E[experts_by_home[i]]
                if tokens < smaller_than and tokens > largest:
                    largest = tokens
                    equal = 1
                elif tokens == largest:
                    equal += 1
            if largest == 0:
                break
            taken = min(equal, -(-excess // largest))
            needed += taken
            excess -= taken * largest
            smaller_than = largest
    return needed
