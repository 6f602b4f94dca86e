"""Rounds of messages: short, the same on both ends, and never a circle of ranks that wait for each other."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.runtime.transfer.message_rounds import MOST_OPERATIONS, Message, rounds_of_rank

Ends = tuple[int, int]


def run(rounds_R: dict[int, list[list[Ends]]]) -> bool:
    """Run the rounds as NCCL does: a rank's next round begins when all of its last one is complete, and a message is
    complete when both ranks are in its round. Returns whether all rounds end."""
    waiting = {rank: [Counter(each) for each in rounds] for rank, rounds in rounds_R.items()}
    while any(waiting.values()):
        now = {rank: rounds[0] for rank, rounds in waiting.items() if rounds}
        met = [
            (ends, now[ends[0]][ends] and now[ends[1]][ends])
            for ends in {ends for each in now.values() for ends in each}
            if ends[0] in now and ends[1] in now and now[ends[0]][ends] and now[ends[1]][ends]
        ]
        if not met:
            return False
        for ends, _ in met:
            count = min(now[rank][ends] for rank in ends)
            for rank in ends:
                now[rank][ends] -= count
        for rank, rounds in waiting.items():
            while rounds and not any(rounds[0].values()):
                rounds.pop(0)
            waiting[rank] = rounds
    return True


@st.composite
def all_messages(draw: st.DrawFn) -> list[Ends]:
    ranks = draw(st.integers(2, 6))
    pairs = st.permutations(range(ranks)).map(lambda order: (order[0], order[1]))
    return [ends for ends in draw(st.lists(pairs, max_size=40)) for _ in range(draw(st.integers(1, 30)))]


def rounds_by_rank(ends: list[Ends]) -> dict[int, list[list[Ends]]]:
    messages = [Message(*each, None) for each in ends]
    ranks = {rank for each in ends for rank in each}
    return {rank: [[m[:2] for m in each] for each in rounds_of_rank(messages, rank)] for rank in ranks}


@given(all_messages())
@settings(max_examples=200)
def test_rounds_are_short_and_end(ends: list[Ends]) -> None:
    rounds = rounds_by_rank(ends)
    for rank, mine in rounds.items():
        assert all(0 < len(each) <= MOST_OPERATIONS for each in mine)
        # All messages of the rank, in their order.
        assert [each for one in mine for each in one] == [each for each in ends if rank in each]
    assert run(rounds)


def test_few_messages_are_one_round() -> None:
    rounds = rounds_by_rank([(0, 1)] * 40 + [(2, 1)] * 24)
    assert [len(rounds[rank]) for rank in range(3)] == [1, 1, 1]
