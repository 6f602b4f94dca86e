"""Slots of expert ranks, draws of tokens, and micro-batches that take turns."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.disaggregated_rollout.channels import Turns
from recipes.disaggregated_rollout.expert_slots import ExpertSlots
from recipes.rl.responses import draw_tokens
from trimtab.array_type import Array
from trimtab.cores import usable_cores


def random_slots(rng: np.random.Generator, experts: int, ranks: int, copies: int) -> ExpertSlots:
    return ExpertSlots.place(rng.integers(0, 50, (2, experts)), ranks, copies)


@given(st.integers(0, 2**32), st.sampled_from([(8, 2, 0), (8, 2, 1), (8, 4, 2), (6, 3, 2), (8, 1, 2)]))
def test_every_choice_gets_a_slot_of_its_expert(seed: int, sizes: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(seed)
    slots = random_slots(rng, *sizes)
    ids_TK = np.argsort(rng.random((rng.integers(0, 40), sizes[0])) ** 3 * np.arange(1, sizes[0] + 1))[:, :3]
    ids_TK[rng.random(ids_TK.shape) < 0.1] = -1
    first = int(rng.integers(0, sizes[1]))
    for layer, slots_XS in enumerate(slots.slots_LXS):
        rank_TK, slot_TK = slots.assign(layer, ids_TK, first)
        assert np.array_equal(np.where(rank_TK < 0, -1, slots_XS[rank_TK, slot_TK]), ids_TK)
        assert rank_TK.tolist() == plain_ranks(slots_XS, ids_TK, first)


def plain_ranks(slots_XS: Array, ids_TK: Array, first: int) -> list[list[int]]:
    """Ranks of choices when each goes to the least loaded rank that has the expert, first those of experts on one
    rank."""
    loads, chosen = [0] * len(slots_XS), np.full(ids_TK.shape, -1)
    choices = [(place, expert) for place, expert in np.ndenumerate(ids_TK) if expert >= 0]
    ranks = {expert: [rank for rank, held in enumerate(slots_XS) if expert in held] for _, expert in choices}
    for place, expert in sorted(choices, key=lambda choice: len(ranks[choice[1]]) > 1):
        chosen[place] = min(ranks[expert], key=lambda rank: (loads[rank], (rank - first) % len(loads)))
        loads[chosen[place]] += 1
    return chosen.tolist()


def rank_loads(slots: ExpertSlots, ids_TK: Array, layer: int) -> Array:
    rank_TK, _ = slots.assign(layer, ids_TK)
    return np.bincount(rank_TK[rank_TK >= 0], minlength=slots.slots_LXS.shape[1])


def test_hot_experts_have_copies_and_ranks_are_even() -> None:
    counts = np.array([[60, 4, 4, 4, 4, 4, 4, 4], [4, 4, 4, 4, 4, 4, 4, 60]])
    # Others were hot before.
    before = ExpertSlots.place(np.array([[4, 4, 4, 60, 50, 4, 4, 4]] * 2), 2, 1)
    after = ExpertSlots.place(counts, 2, 1)
    for layer, hot in enumerate((0, 7)):
        assert [hot in rank for rank in after.slots_LXS[layer].tolist()] == [True, True]
        ids_TK = np.repeat(np.arange(8), counts[layer])[:, None]
        loads = [rank_loads(slots, ids_TK, layer) for slots in (before, after)]
        assert loads[0].max() > 60
        assert loads[1].tolist() == [44, 44]
    held = [[set(rank) for layer in slots.slots_LXS.tolist() for rank in layer] for slots in (before, after)]
    assert after.replaced(before) == sum(len(new - old) for old, new in zip(*held, strict=True)) > 0
    assert after.replaced(after) == 0


def test_one_rank_has_every_expert_once() -> None:
    slots = ExpertSlots.place(np.full((3, 8), 5), 1, copies=2)
    assert slots.slots_LXS.tolist() == [[[*range(8)]]] * 3


def test_draws_follow_the_distribution_whatever_the_batch() -> None:
    log_probs = torch.tensor([0.5, 0.0, 0.2, 0.3, 0.0]).log()
    uniforms = np.random.default_rng(1).random(20_000)
    tokens = draw_tokens(log_probs.expand(len(uniforms), -1), uniforms)
    shares = np.bincount(tokens, minlength=5) / len(tokens)
    assert shares == pytest.approx([0.5, 0, 0.2, 0.3, 0], abs=0.02)
    alone = [int(draw_tokens(log_probs[None], uniforms[n : n + 1])) for n in range(50)]
    assert tokens[:50].tolist() == alone
    assert int(draw_tokens(log_probs[None], np.zeros(1))) == 0
    assert int(draw_tokens(log_probs[None], np.array([1 - 1e-12]))) == 3


def test_turns_go_round() -> None:
    turns, order = Turns(3), []

    def work(index: int) -> None:
        for _ in range(2 + index):
            order.append(index)
            turns.give_way()

    turns.run(work)
    assert order == [0, 1, 2, 0, 1, 2, 1, 2, 2]


@pytest.mark.skipif(usable_cores() < 2, reason="one core")
def test_micro_batches_compute_on_as_many_cores_as_their_rank() -> None:
    """Ranks share cores: those of another rank would compute for this one, and both would wait."""
    before, seconds = torch.get_num_threads(), []

    def work(_: int) -> None:
        matrix, start = torch.randn(1500, 1500), (time.process_time(), time.thread_time())
        for _ in range(4):
            matrix @ matrix
        seconds.append((time.process_time() - start[0], time.thread_time() - start[1]))

    torch.set_num_threads(1)
    try:
        Turns(2).run(work)
    finally:
        torch.set_num_threads(before)
    assert len(seconds) == 2
    for of_process, of_thread in seconds:
        assert of_thread > 0.8 * of_process


def test_the_first_error_ends_the_others() -> None:
    turns, done = Turns(3), []

    def work(index: int) -> None:
        for step in range(3):
            if (index, step) == (1, 1):
                raise ValueError("no such expert")
            done.append((step, index))
            turns.give_way()

    with pytest.raises(ValueError, match="no such expert"):
        turns.run(work)
    assert done == [(0, 0), (0, 1), (0, 2), (1, 0)]
