"""The timeline: when each rank of an expert-parallel group does what, in passes over the layers."""

from __future__ import annotations

import numpy as np

# In the order in which bars are stacked.
PARTS = {
    "attention": "attention and other dense parts",
    "dispatch": "dispatch and combine",
    "experts": "experts, if all ranks had the same load",
    "imbalance": "waiting for the busiest rank",
    "transfers": "waiting for replicas and their gradients",
    "planning": "waiting for a plan",
    "migration": "moving homes and refreshing mirrors",
    "optimizer": "optimizer and gradient sums",
}
# Indices into `PARTS`; int64, because numba compiles a function once more for every Python int.
ATTENTION, DISPATCH, EXPERTS, IMBALANCE, TRANSFERS, PLANNING, MIGRATION, OPTIMIZER = np.arange(len(PARTS))
