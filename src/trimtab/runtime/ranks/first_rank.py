"""`on_first_rank`: runs a function on one rank and broadcasts its result or its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from trimtab.errors import InputError

T = TypeVar("T")


def on_first_rank(function: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Call a function on the first rank of a group. Returns its result on all ranks. Collective.

    Raises:
        InputError: on all ranks, if the function raises it.
    """
    message: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            message = [function()]
        except InputError as error:
            message = [error]
    dist.broadcast_object_list(message, group=group, group_src=0)
    if isinstance(message[0], InputError):
        raise message[0]
    result: T = message[0]
    return result
