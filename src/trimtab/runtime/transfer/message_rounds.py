"""Messages between two ranks, in rounds of at most `MOST_OPERATIONS` on a rank.

A batch of messages is one NCCL group, and large groups can hang (pytorch issue 174288: some 256 operations). Batches
that different ranks split differently can wait for each other in a circle. All ranks therefore derive the round of
each message from the same list; every rank posts its rounds in ascending order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from trimtab.runtime.transfer import streams

# Most sends and receives of a rank in one batch.
MOST_OPERATIONS = 64


class Message(NamedTuple):
    """One tensor from one rank to another.

    Attributes:
        sender, receiver: different ranks, by their numbers in the group.
        tensor: on these two ranks, what is sent or where it arrives; None on others.
    """

    sender: int
    receiver: int
    tensor: torch.Tensor | None


Posted = tuple[bool, dist.Work]
"""Messages in transfer: whether a tensor arrives on this rank; and one message, or a batch where the backend has one
work for all."""


def rounds_of_rank(messages: Sequence[Message], rank: int) -> list[list[Message]]:
    """The messages of one rank, by round.

    Args:
        messages: those of all ranks, in the same order on all ranks.
    """
    if len(messages) <= MOST_OPERATIONS:
        mine = [message for message in messages if rank in message[:2]]
        return [mine] if mine else []
    # The round that every rank is in, and its operations in that round.
    state: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    rounds: defaultdict[int, list[Message]] = defaultdict(list)
    for message in messages:
        ends = message[:2]
        number = max(state[end][0] for end in ends)
        if any(state[end] == (number, MOST_OPERATIONS) for end in ends):
            number += 1
        for end in ends:
            at, operations = state[end]
            state[end] = number, operations + 1 if at == number else 1
        if rank in ends:
            rounds[number].append(message)
    return [rounds[number] for number in sorted(rounds)]


def post_round(messages: Sequence[Message], rank: int, group: dist.ProcessGroup, *, tag: int = 0) -> list[Posted]:
    """Start the messages of one of this rank's rounds.

    Args:
        tag: separates the messages of different calls where the backend supports tags.
    """
    posted: list[Posted] = []
    operations: list[dist.P2POp] = []
    receives: list[bool] = []
    is_queued = messages[0].tensor is not None and streams.has_streams(messages[0].tensor.device)
    for sender, receiver, tensor in messages:
        assert tensor is not None
        arrives = receiver == rank
        # Rows of transposed experts are copied.
        peer, part = (sender, tensor) if arrives else (receiver, tensor.contiguous())
        if is_queued:
            kind = dist.irecv if arrives else dist.isend
            operations.append(dist.P2POp(kind, part, group=group, group_peer=peer, tag=tag))
            receives.append(arrives)
        else:
            # torch's own functions take as long as a small message.
            posted.append((arrives, group.recv([part], peer, tag) if arrives else group.send([part], peer, tag)))
    if not operations:
        return posted
    works = dist.batch_isend_irecv(operations)
    if len(works) == len(operations):
        return [*zip(receives, works, strict=True)]
    return [(any(receives), work) for work in works]


def post(messages: Sequence[Message], rank: int, group: dist.ProcessGroup, *, tag: int = 0) -> list[Posted]:
    """Start all messages of this rank, round by round; see `rounds_of_rank` and `post_round`."""
    posted: list[Posted] = []
    for of_round in rounds_of_rank(messages, rank):
        posted += post_round(of_round, rank, group, tag=tag)
    return posted
