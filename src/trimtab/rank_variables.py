"""Environment variables of ranks: what torchrun, or a program like it, sets, and what switches Trimtab off."""

from __future__ import annotations

import os

from trimtab.errors import InputError

# Lets several ranks use one GPU, from NCCL 2.30 on; older versions raise.
SHARE_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
# Options of most plugins, as `mode=plan slots_per_rank=2`. `mode=off` counts in every integration and session.
BALANCE = "TRIMTAB_BALANCE"


def rank_variable(name: str, default: int | None = None) -> int:
    """The value of an environment variable such as `WORLD_SIZE`.

    Args:
        default: returned if it is not set; None if it has to be.

    Raises:
        InputError: if it is missing or not a whole number.
    """
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        found = "not set" if text is None else repr(text)
        raise InputError(
            f"the environment variable {name} is {found}; it should be a whole number, as torchrun sets it, or RANK "
            "should not be set"
        )
    return int(text)


def torchrun_ranks() -> int | None:
    """The number of ranks if torchrun, or a program that sets its variables, started this process; else None.

    Raises:
        InputError: if a variable is missing, or not a number in its range.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, ranks = rank_variable("RANK"), rank_variable("WORLD_SIZE")
    if rank >= ranks:
        raise InputError(f"the environment variable RANK is {rank}; it should be below WORLD_SIZE, {ranks}")
    rank_variable("LOCAL_RANK")
    return ranks


def can_share_gpus() -> bool:
    """Whether several ranks may use one GPU: for checks on a machine with few GPUs, since their compute takes turns."""
    return os.environ.get(SHARE_GPUS) == "1"


def is_switched_off() -> bool:
    """Whether `BALANCE` has `mode=off`, by which a run is repeated without Trimtab, and no code is changed."""
    return "mode=off" in os.environ.get(BALANCE, "").split()
