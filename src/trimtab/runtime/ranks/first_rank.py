"""`on_first_rank`: runs a function on one rank and broadcasts its result or its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from trimtab.errors import InputError

T = TypeVar("T")


class _Failure(NamedTuple):
    """An error of the first rank, whose own class other ranks may not be able to load."""

    text: str
    is_input: bool


def on_first_rank(function: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Call a function on the first rank of a group. Returns its result on all ranks. Collective.

    Raises:
        InputError: on all ranks, if the function raises it.
        RuntimeError: on other ranks, if the function raises anything else, with the rank and the error.
    """
    message: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            message = [function()]
        except BaseException as error:
            first = dist.get_process_group_ranks(group)[0]
            is_input = isinstance(error, InputError)
            text = str(error) if is_input else f"rank {first} failed: {type(error).__name__}: {error}"
            dist.broadcast_object_list([_Failure(text, is_input)], group=group, group_src=0)
            raise
    dist.broadcast_object_list(message, group=group, group_src=0)
    if isinstance(message[0], _Failure):
        kind = InputError if message[0].is_input else RuntimeError
        raise kind(message[0].text)
    result: T = message[0]
    return result
