"""Checkpoints by `torch.distributed.checkpoint` have the experts of all ranks, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from helpers.moe_model import Shape
from helpers.planned_steps import make
from helpers.rank_tests import runs_on_ranks
from helpers.tiny_training import MIXED, SHAPES, adamw, change, error_of, train

SAVES: tuple[Callable[..., Any], ...] = (save, async_save)


def folder_of_first(folder: Path) -> str:
    """The same folder on all ranks."""
    names = [str(folder)]
    dist.broadcast_object_list(names)
    return names[0]


@runs_on_ranks()
def test_stacks_are_dtensors() -> None:
    session, model, reference = make(shape=MIXED)
    name = "blocks.0.gate_up"
    stack: Any = session.dcp_state_dict(model)[name]
    assert isinstance(stack, DTensor)
    assert torch.equal(stack.full_tensor(), reference.get_parameter(name))


@SHAPES
@runs_on_ranks()
def test_state_dicts_of_one_rank_are_refused(tmp_path: Path, shape: Shape) -> None:
    session, model, reference = make(shape=shape)
    folder = folder_of_first(tmp_path / "checkpoint")
    optimizer = adamw(model)
    session.register_optimizers(optimizer)
    train(session, model, reference, 1, optimizer, adamw(reference))
    state = model.state_dict()
    for each in (state, {"model": copy.deepcopy(state)}, optimizer.state_dict()["state"]):
        for call in SAVES:
            with pytest.raises(CheckpointException, match=r"session\.dcp_state_dict\(model\)"):
                call(each, checkpoint_id=folder).result()
    save(session.dcp_state_dict(model), checkpoint_id=folder)
    # Of a stack, DCP compares the size first.
    with pytest.raises(CheckpointException, match=r"session\.dcp_state_dict\(model\)|Size mismatch .* for blocks"):
        load(state, checkpoint_id=folder)
    # Other uses of it are not affected.
    file = tmp_path / f"{session.rank}.pt"
    torch.save(state, file)
    loaded = torch.load(file, weights_only=True)
    assert all(not vars(value) for value in loaded.values())
    change(model)
    model.load_state_dict(loaded)
    assert error_of(model, reference) < 1e-6
