"""Environment variables that decide whether transfers hang, or wait for compute, on GPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

# The first version of NCCL that orders the kernels of its communicators.
ORDERS_SINCE = (2, 26)


def wrong_variables(nccl: tuple[int, ...], variables: Mapping[str, str] = os.environ) -> list[str]:
    """What is wrong with the environment of a process with GPUs, and the remedy; one line each.

    Args:
        nccl: version of NCCL.
    """
    found = []
    version = ".".join(map(str, nccl))
    if nccl < ORDERS_SINCE:
        found.append(
            f"NCCL {version} does not order its communicators, so ranks can wait for each other without end; use 2.26 "
            "or later"
        )
    elif variables.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "1":
        found.append(
            "a session has several NCCL communicators, which can wait for each other without end; set "
            "NCCL_LAUNCH_ORDER_IMPLICIT=1 for all ranks"
        )
    if variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        found.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 lets transfers wait for compute that was started before them; unset it, or "
            "set it to 8 or more"
        )
    return found


_told: set[str] = set()


def tell_wrong_variables() -> None:
    """Log what is wrong, once in a process."""
    for problem in wrong_variables(torch.cuda.nccl.version()):
        if problem not in _told:
            _told.add(problem)
            logging.getLogger("trimtab").warning("%s", problem)
