"""The warm start's load-balancing loss: its value, the rows that count, its effect."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from helpers.rank_tests import runs_on_ranks
from helpers.trainers import LAYERS, TOP_K, start
from trimtab.rl import warm_start
from trimtab.rl.warm_start import load_balancing_loss
from trimtab.runtime import Session


def test_the_loss_equals_that_of_transformers_for_one_layer() -> None:
    logits = torch.randn(40, 8)
    expected = load_balancing_loss_func((logits,), 8, 2)
    assert float(load_balancing_loss(logits, logits.topk(2).indices)) == pytest.approx(float(expected) / 2, rel=1e-5)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@runs_on_ranks()
def test_padding_does_not_count_in_the_load_balancing_loss(folder: Path, gradient_checkpointing: bool) -> None:
    shapes, values = list[tuple[int, ...]](), list[float]()

    def kept_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        value = load_balancing_loss(logits, ids)
        shapes.append((len(micro_step.call_args.kwargs["positions"]), *ids.shape))
        values.append(float(value.detach()))
        return value

    with (
        mock.patch.object(warm_start, "BALANCE_WEIGHT", 10.0),
        mock.patch.object(warm_start, "load_balancing_loss", kept_loss),
        mock.patch.object(Session, "live_micro_step", autospec=True, side_effect=Session.live_micro_step) as micro_step,
    ):
        start(folder, warm_start_steps=12, gradient_checkpointing=gradient_checkpointing).close()
    assert len(shapes) == 12 * LAYERS
    for fed, rows, top_k in shapes:
        assert (rows, top_k) == (fed, TOP_K)
    assert LAYERS < sum(values[-LAYERS:]) < sum(values[:LAYERS]) - 0.02
