"""A step of a training loop: each action does the same on the model in the session and on the whole model.

All ranks call the same actions. What a loop may not do raises, as each action asserts.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.late_device import unwaited
from helpers.loop import MAX_NORM, Changes, ExpectedError, Loop, Pending, action, has_gradients, zero_gradients
from trimtab.array_type import Array
from trimtab.errors import InputError

# Errors of a backward whose forward is out of date.
STALE = r"another plan was applied|modified by an inplace|changed within|was suspended between"


def forward(
    loop: Loop,
    index: int,
    run: str = "plain",
    number: int | None = None,
    at_once: bool = False,
    skipped: frozenset[int] = frozenset(),
    inference: bool = False,
    deviates: int | None = None,
    padded: bool = False,
    chunk: tuple[int, int] = (0, 1),
) -> None:
    """A micro-step's forward.

    Args:
        run: how blocks run, see `TinyMoE`.
        number: of the pending backward; without gradients if None.
        at_once: run the backward inside the micro-step.
        inference: run in inference mode.
        deviates: some tokens get other ids than the recorded ones, drawn with this seed. One rank announces it.
        padded: layers are given rows of no token, too.
        chunk: a pipeline chunk, and the number of all. Chunks of one forward have one number.
    """
    run, session, model = loop.may_run(run), loop.session, loop.model
    if loop.offloaded_parameters is not None:
        with pytest.raises(InputError, match="has no memory now"), loop.micro_step(index):
            pass
        return
    rows, mine = loop.rows(index), loop.rows(index, loop.data_rank)
    # Without the first, a middle and the last row.
    places = torch.arange(len(mine))
    positions = places + 1 + (places >= len(mine) // 2) if padded else None
    chosen = None if deviates is None or loop.is_live else loop.chosen_ids(deviates)
    model.run_block, model.skipped = run, skipped
    model.chosen_ids = None if chosen is None else _ids_of_layers(chosen[mine.numpy()], positions)
    before, run_before = session.counters.deviating_rows, [block.rows_run for block in model.moe_blocks()]
    is_announced = chosen is not None and deviates is not None and deviates % session.num_ranks == session.rank
    first, end = (len(session.layers) * place // chunk[1] for place in (chunk[0], chunk[0] + 1))
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode() if inference else torch.set_grad_enabled(number is not None))
        pending = loop.pending[number or 0] if chunk[0] else Pending(loop.changes, loop.is_carried_out)
        if number is not None:
            loop.pending[number] = pending
        stack.enter_context(loop.micro_step(index, positions=positions, may_deviate=is_announced))
        if pending.left is None:
            x = model.embed(loop.batch(mine, positions))
        else:
            x = pending.left.detach().requires_grad_(number is not None)
            pending.cuts.append((pending.left, x))
        with nullcontext() if loop.may_wait or chosen is not None else unwaited():
            pending.left = x = model.run(x, first, end)
            logits = model.head(x) if chunk[0] + 1 == chunk[1] else None
        if logits is not None:
            pending.loss, logits = loop.loss_of(logits, mine, positions)
            pending.expected, expected = loop.expect(rows, run, skipped, live=loop.is_live, chosen=chosen)
            if at_once and number is not None:
                _backward(loop, number)
    # Queued work reads them.
    loop.kept += model.chosen_ids or []
    model.chosen_ids = None
    if chunk == (0, 1) and not loop.is_live:
        wanted = _count_deviating(chosen, loop.recorded_ids(), mine.numpy(), skipped)
        assert session.counters.deviating_rows - before == wanted
        if loop.is_planned and chosen is None and not skipped:
            rows_run = [block.rows_run - one for block, one in zip(model.moe_blocks(), run_before, strict=True)]
            assert rows_run == session.rank_loads[index, :, session.rank].tolist(), "rows of the plan"
    if logits is not None:
        is_read = ~loop.unread_T
        places = torch.searchsorted(rows[is_read[rows.numpy()]], mine[is_read[mine.numpy()]])
        error = loop.error_of(logits, expected[places])
        assert error < 1, ("logits", error)
    if loop.compares:
        loop.compare()


def _ids_of_layers(ids_NLK: Array, positions: torch.Tensor | None) -> list[torch.Tensor]:
    """Ids of this rank's rows by layer, -1 for rows of no token."""
    ids = [torch.from_numpy(ids_NLK[:, layer]) for layer in range(ids_NLK.shape[1])]
    if positions is None:
        return ids
    return [torch.full((len(each) + 3, each.shape[1]), -1).index_copy(0, positions, each) for each in ids]


def _count_deviating(chosen_TLK: Array | None, recorded_TLK: Array, mine: Array, skipped: frozenset[int]) -> int:
    if chosen_TLK is None:
        return 0
    chosen_NLK, recorded_NLK = chosen_TLK[mine], recorded_TLK[mine]
    is_recorded = (chosen_NLK[..., None] == recorded_NLK[:, :, None]).any(axis=3)
    deviates = ~is_recorded & (chosen_NLK >= 0) & (recorded_NLK >= 0)
    return int(deviates[:, [layer for layer in range(deviates.shape[1]) if layer not in skipped]].sum())


@action
def live(loop: Loop, seed: int, run: str = "plain", number: int | None = None) -> None:
    """A forward outside any micro-step, on the router's choice: evaluation, generation, another loss."""
    run, rng = loop.may_run(run), np.random.default_rng(seed)
    rank_of = rng.integers(0, dist.get_world_size(), len(loop.tokens))
    rows, mine = torch.arange(len(loop.tokens)), torch.from_numpy(np.flatnonzero(rank_of == loop.data_rank))
    with torch.set_grad_enabled(number is not None):
        expected, expected_logits = loop.expect(rows, run, live=True)
        loop.model.run_block, loop.model.skipped = run, frozenset()
        loss, logits = loop.loss(loop.model, mine)
    is_read, is_mine_read = ~loop.unread_T, ~loop.unread_T[mine.numpy()]
    places = torch.from_numpy(np.cumsum(is_read) - 1)[mine[is_mine_read]]
    assert loop.error_of(logits, expected_logits[places]) < 1, "live logits"
    if number is not None:
        loop.pending[number] = Pending(loop.changes, False, loss=loss, expected=expected)


@action
def backward(loop: Loop, number: int, twice: bool = False, chunk: int = 0) -> None:
    """The backward of a pending forward, or of one chunk, outside any micro-step; or two. It fails if the forward is
    out of date."""
    pending = loop.pending[number]
    before, now = pending.changes, loop.changes
    if before.weights != now.weights or (pending.is_planned and before.plans != now.plans):
        with pytest.raises(RuntimeError, match=STALE):
            loop.pending.pop(number).loss.backward()
        # As a loop must do after a failed backward.
        zero_gradients(loop)
    elif before != now:
        # It runs unless experts have moved, a checkpointed layer would run again, or an optimizer stepped, even without
        # gradients.
        try:
            _backward(loop, number)
        except RuntimeError as error:
            assert re.search(STALE, str(error))
            loop.pending.pop(number)
            zero_gradients(loop)
    else:
        _backward(loop, number, twice, chunk)


def _backward(loop: Loop, number: int, twice: bool = False, chunk: int = 0) -> None:
    pending = loop.pending[number]
    if chunk == len(pending.cuts):
        loss = pending.loss
        with nullcontext() if loop.may_wait else unwaited():
            if twice:
                (loss / 4).backward(retain_graph=True)
                loss = loss * 3 / 4
            loss.backward()
    else:
        left, entered = pending.cuts.pop()
        left.backward(entered.grad)
    if chunk:
        return
    del loop.pending[number]
    if loop.is_finished and not has_gradients(loop.reference):
        loop.is_finished = False  # Adding to zeros is allowed.
    pending.expected.backward()
    loop.has_mixed_gradients |= loop.is_finished


@action
def touch(loop: Loop, rank: int) -> None:
    """A backward without MoE layers, on one rank alone."""
    mix: Any = loop.model.mixes[-1]
    if dist.get_rank() == rank % dist.get_world_size():
        mix.bias.sum().backward()
    if loop.is_finished and not has_gradients(loop.reference):
        loop.is_finished = False
    whole: Any = loop.reference.mixes[-1]
    whole.bias.sum().backward()
    loop.has_mixed_gradients |= loop.is_finished


@action
def fail(loop: Loop, index: int, run: str, block: int, where: str) -> None:
    """An exception on all ranks: in a micro-step's `forward`, or in its backward, `inside` or `outside` the micro-step.

    After a failed backward the gradients of the accumulation are dropped.
    """

    def stop(*_: object) -> None:
        raise ExpectedError

    def hook(at: int, x: torch.Tensor) -> torch.Tensor:
        if at == block:
            if where == "forward":
                stop()
            if not x.requires_grad:
                x = x.detach().requires_grad_()
            x.register_hook(stop)
        return x

    def run_both() -> None:
        with loop.micro_step(index):
            loss, _ = loop.loss(loop.model, loop.rows(index, loop.data_rank))
            if where == "inside":
                loss.backward()
        loss.backward()

    loop.model.before_block, loop.model.run_block, loop.model.skipped = hook, loop.may_run(run), frozenset()
    with pytest.raises(ExpectedError):
        run_both()
    loop.model.before_block = None
    if where != "forward":
        zero_gradients(loop)


def finish(loop: Loop) -> None:
    """Complete the gradients; once for each accumulation."""
    if loop.is_finished and has_gradients(loop.reference):
        with pytest.raises(RuntimeError, match="summed over ranks already"):
            loop.session.finish_gradients(loop.dense())
        return
    loop.session.finish_gradients(loop.dense())
    loop.is_finished = True
    if loop.compares:
        loop.compare()


@action
def step(loop: Loop, zero: bool | None = True) -> None:
    """An optimizer step with complete gradients, clipped where the loop's are.

    Args:
        zero: value of `set_to_none` for the zeroing after it; None: gradients are kept.
    """
    if loop.has_mixed_gradients:
        zero_gradients(loop)
    if not loop.is_finished:
        finish(loop)
    if loop.options.sgd and has_gradients(loop.reference):
        norm = loop.session.clip_gradients(loop.dense(), MAX_NORM)
        expected = torch.nn.utils.clip_grad_norm_(loop.reference.parameters(), MAX_NORM)
        assert loop.error_of(torch.as_tensor(norm, dtype=expected.dtype), expected) < loop.most, (
            "norm",
            norm,
            expected,
        )
    # An optimizer skips parameters without gradients.
    changes = any(p.grad is not None for p in loop.reference.parameters())
    loop.changes = Changes(loop.changes.plans, loop.changes.weights + changes, loop.changes.steps + 1)
    for optimizer in loop.optimizers:
        optimizer.step()
    loop.has_stepped = True
    for average, model in zip(loop.averages, (loop.model, loop.reference), strict=True):
        for name, parameter in model.named_parameters():
            if name in average:
                average[name].data.mul_(0.75).add_(parameter.detach(), alpha=0.25)
    if zero is not None:
        zero_gradients(loop, zero)


def update(loop: Loop, index: int = 0, number: int = 1) -> None:
    """Forward and backward of a micro-step."""
    forward(loop, index, "plain", number, True)


def zero(loop: Loop, to_none: bool = True) -> None:
    """Gradients are zeroed."""
    zero_gradients(loop, to_none)
    if loop.compares:
        loop.compare()
