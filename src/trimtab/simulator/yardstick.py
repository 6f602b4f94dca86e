"""`yardstick`: identifies what balancers are compared with, so that figures of different versions are comparable."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

# Source files that define synthetic routing, the other balancers, the planner's packing that they use, and the planning
# time that every balancer is charged. Trimtab's own planner, and the plan and load types that all share,
# are not among them.
SOURCES = (
    "trace/presets.py",
    "trace/sampling.py",
    "planner/schedule/schedule.py",
    "planner/placement/packing.py",
    "policies/policy.py",
    "policies/static.py",
    "policies/planning_time.py",
    "policies/planning_times.json",
)
FOLDERS = ("policies/rivals",)


@cache
def yardstick() -> str:
    """Returns 12 hexadecimal digits, a digest of the files of `SOURCES` and the modules of `FOLDERS`.

    Two comparisons with the same digest, trace, cluster and model differ only in Trimtab's planner and the simulator.
    """
    package = files("trimtab")
    names = [*SOURCES]
    for folder in FOLDERS:
        names += [f"{folder}/{file.name}" for file in package.joinpath(folder).iterdir() if file.name.endswith(".py")]
    digest = hashlib.blake2b(digest_size=6)
    for name in sorted(names):
        digest.update(name.encode() + b"\0" + package.joinpath(name).read_bytes() + b"\0")
    return digest.hexdigest()
