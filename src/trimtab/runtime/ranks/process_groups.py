"""Process groups: their creation, once for all sessions of a process, and environment variables without which they hang
on GPUs."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from trimtab.errors import InputError

# Groups for messages during compute, and the blocks (each on one multiprocessor) that a kernel of theirs has at most.
BACKGROUND = ("weights", "gradients")
BACKGROUND_CTAS = 8
# For which a rank waits for others by default. Gloo's own timeout is 30 minutes.
LONGEST_WAIT = timedelta(minutes=10)
# NCCL's default size of a buffer of a channel, and an estimate of how many channels two ranks have.
BUFFER_BYTES = 4 << 20
CHANNELS_PER_PEER = 2
# The first version of NCCL that orders the kernels of its communicators.
ORDERS_SINCE = (2, 26)


def ranks_of(name: str, group: dist.ProcessGroup) -> list[int]:
    """Global ranks of a group, in its order. Raises InputError if this rank is not one of them."""
    # On ranks that are not in a group, torch has a number in place of the group.
    if not isinstance(group, dist.ProcessGroup) or group not in distributed_c10d._world.pg_group_ranks:
        raise InputError(
            f"{name} is not a process group of rank {dist.get_rank()}; create the session on the group's ranks only"
        )
    return dist.get_process_group_ranks(group)


def inner_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group that a framework's wrapper has now, in `group`: that of slime and miles is destroyed when the device is
    handed to the rollout, and created again. Other groups are returned as they are.
    """
    inner = getattr(group, "group", None)
    return inner if isinstance(inner, dist.ProcessGroup) else group


_Created = WeakValueDictionary[tuple[tuple[int, ...], str, str, timedelta], dist.ProcessGroup]
"""Created groups by ranks, use, backend and timeout.

Sessions of one process share groups, since their number in a process is limited. References are weak, so that the
threads of a group end when it is destroyed.
"""

# By default group, since groups are destroyed with the default group in which they were created.
_created: WeakKeyDictionary[dist.ProcessGroup, _Created] = WeakKeyDictionary()
# How many groups were created for the same ranks and use. Their names must differ also from those of destroyed ones,
# whose addresses may still be in the store.
_numbers: Counter[tuple[tuple[int, ...], str]] = Counter()


def group_of(ranks: Sequence[int], use: str, *, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """The group of these ranks in this order. Collective over these ranks only, if it does not exist yet."""
    world = dist.group.WORLD
    assert world is not None
    created = _created.setdefault(world, WeakValueDictionary())
    key = (tuple(ranks), use, backend, timeout)
    group = created.get(key)
    if group is None:
        group = _new_group(ranks, use, _numbers[tuple(ranks), use], backend=backend, timeout=timeout)
        _numbers[tuple(ranks), use] += 1
        # The first call of an NCCL group must include all ranks. A barrier would use gloo, if the group also has gloo.
        if "nccl" in dist.get_backend_config(group):
            # Connects every pair of ranks, as the first messages would do in the middle of a step.
            sent = torch.zeros(len(ranks), device="cuda")
            dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
        else:
            dist.barrier(group=group)
        created[key] = group
    return group


def destroy_groups(kept: Iterable[dist.ProcessGroup]) -> None:
    """Destroy all groups that `group_of` has created, but for some. Collective over the ranks of each."""
    world, others = dist.group.WORLD, set(kept)
    created = None if world is None else _created.get(world)
    for key, group in list((created or {}).items()):
        if created is not None and group not in others:
            del created[key]
            dist.destroy_process_group(group)


def communicator_bytes() -> int:
    """Estimated device memory of the NCCL communicators of this process that `group_of` has created: of every other
    rank `CHANNELS_PER_PEER` buffers for receiving and as many for sending."""
    world = dist.group.WORLD
    keys = [] if world is None else [*_created.get(world, ())]
    peers = sum(len(ranks) - 1 for ranks, _, backend, _ in keys if "nccl" in backend)
    return peers * 2 * CHANNELS_PER_PEER * int(os.environ.get("NCCL_BUFFSIZE", BUFFER_BYTES))


def _new_group(ranks: Sequence[int], use: str, number: int, *, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """`new_group(use_local_synchronization=True)` with another name, and ranks in the given order.

    torch derives the name from the number of groups in the process. If some ranks have created groups that others have
    not, such as a group that sends weights to rollout engines, the names differ and the ranks block. Older torch also
    sorts the ranks.
    """
    digest = hashlib.sha1(repr(list(ranks)).encode(), usedforsecurity=False).hexdigest()
    with _unbound():
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            distributed_c10d.Backend(backend),
            distributed_c10d._get_default_store(),
            f"trimtab/{use}/{digest}/{number}",  # type: ignore[arg-type]
            timeout=timeout,
            backend_options=_options(use, backend, timeout),
            group_desc=f"trimtab {use}",
        )
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


@contextmanager
def _unbound() -> Iterator[None]:
    """The default group without the device of `init_process_group(device_id=)`.

    With it torch splits new communicators from that of all ranks, and waits for ranks that have no part in the session.
    """
    world = dist.group.WORLD
    assert world is not None
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def _options(use: str, backend: str, timeout: timedelta) -> object:
    """Options of an NCCL group that runs during compute: few multiprocessors, which it gets at once."""
    if use not in BACKGROUND or "nccl" not in backend:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    options.config.max_ctas = BACKGROUND_CTAS
    return options


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The shortest timeout of a group's backends, or `LONGEST_WAIT` if that is shorter."""
    timeouts = [group._get_backend(device).options._timeout for device in group._device_types]
    return min(LONGEST_WAIT, *timeouts)


def wrong_variables(nccl: tuple[int, ...], variables: Mapping[str, str] = os.environ) -> list[str]:
    """What is wrong with the environment of a process with GPUs, and the remedy; one line each.

    Args:
        nccl: version of NCCL.
    """
    problems = []
    version = ".".join(map(str, nccl))
    if nccl < ORDERS_SINCE:
        problems.append(
            f"NCCL {version} does not order its communicators, so ranks can wait for each other without end; use 2.26 "
            "or later"
        )
    elif variables.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "1":
        problems.append(
            "a session has several NCCL communicators, which can wait for each other without end; set "
            "NCCL_LAUNCH_ORDER_IMPLICIT=1 for all ranks"
        )
    if variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        problems.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 lets transfers wait for compute that was started before them; unset it, or "
            "set it to 8 or more"
        )
    return problems


_told: set[str] = set()


def tell_wrong_variables() -> None:
    """Log what is wrong, once in a process."""
    for problem in wrong_variables(torch.cuda.nccl.version()):
        if problem not in _told:
            _told.add(problem)
            logging.getLogger("trimtab").warning("%s", problem)
