"""The warm start's load-balancing loss: its value, the rows that count, its effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from helpers.rank_pool import RankPool
from helpers.runs import save_tiny_model
from helpers.trainers import LAYERS, TOP_K, start
from trimtab.rl import warm_start
from trimtab.rl.warm_start import load_balancing_loss

State = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm start")
    save_tiny_model(folder / "model")
    (folder / "out").mkdir()
    return folder


def test_the_loss_equals_that_of_transformers_for_one_layer() -> None:
    logits = torch.randn(40, 8)
    expected = load_balancing_loss_func((logits,), 8, 2)
    assert float(load_balancing_loss(logits, logits.topk(2).indices)) == pytest.approx(float(expected) / 2, rel=1e-5)


def train(state: State, folder: Path, gradient_checkpointing: bool) -> tuple[list[list[int]], list[float]]:
    """For every call of the loss the shape of the ids, and fed rows of the batch; losses of the first and last step."""
    shapes, values = [], []
    encode, fed_rows = warm_start._encode, []

    def kept_encode(*args: Any) -> Any:
        encoded = encode(*args)
        fed_rows.append(len(encoded[1]))
        return encoded

    def kept_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        value = load_balancing_loss(logits, ids)
        shapes.append([fed_rows[-1], *ids.shape])
        values.append(float(value.detach()))
        return value

    with (
        mock.patch.object(warm_start, "BALANCE_WEIGHT", 10.0),
        mock.patch.object(warm_start, "load_balancing_loss", kept_loss),
        mock.patch.object(warm_start, "_encode", kept_encode),
    ):
        start(folder, warm_start_steps=12, gradient_checkpointing=gradient_checkpointing).close()
    return shapes, [sum(values[:LAYERS]), sum(values[-LAYERS:])]


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_padding_does_not_count_in_the_load_balancing_loss(
    pool: RankPool, folder: Path, gradient_checkpointing: bool
) -> None:
    for shapes, (first, last) in pool.call(train, folder, gradient_checkpointing):
        assert len(shapes) == 12 * LAYERS
        for fed_rows, rows, top_k in shapes:
            assert (rows, top_k) == (fed_rows, TOP_K)
        assert LAYERS < last < first - 0.02
