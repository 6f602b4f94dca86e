"""Experts of Megatron models move between optimizer steps with all of their state."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.megatron_moves import compare_checkpoints, save_checkpoints
from helpers.megatron_runs import Layout, MegatronCase
from trimtab.launch import launch

LAYOUTS = {
    "EP 2": Layout(2, 2),
    "EP 2 x expert-DP 2": Layout(4, 2),
    "PP 2 x EP 2": Layout(4, 2, pipeline=2),
}
CASES = [
    MegatronCase(adam=True, double=True),
    MegatronCase(adam=True),
    MegatronCase(bf16=True, adam=True),
    MegatronCase(distributed_optimizer=True),
    MegatronCase(distributed_optimizer=True, overlap=True),
    MegatronCase(distributed_optimizer=True, bf16=True, overlap=True),
]
STEPS = 20


@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_with_moves_train_as_models_without(layout: str) -> None:
    launch(train, (LAYOUTS[layout], CASES), ranks=LAYOUTS[layout].ranks)


def train(layout: Layout, cases: list[MegatronCase]) -> None:
    from helpers.megatron_moves import Pair, prepare

    prepare(layout)
    for case in cases:
        pair = Pair(layout, case, mode="off")
        moved = 0
        for step in range(STEPS):
            if step % 3 != 2:
                moved += pair.move()
            tokens_MBS = pair.tokens()
            pair.zero()
            for model in (pair.plain, pair.moving):
                model.run(pair.function, tokens_MBS)
                model.optimizer.step()
        assert moved > 0
        error = pair.difference()
        print(case, error)
        assert error < (1e-12 if case.double else 2e-2 if case.bf16 else 1e-5), (case, error)


@pytest.mark.parametrize("name", ["Adam", "distributed optimizer"])
def test_checkpoints_are_those_of_models_without_moves(name: str, tmp_path: Path) -> None:
    """Megatron without Trimtab loads them, also on other ranks; with plain Adam it does so on the same only."""
    is_distributed = name == "distributed optimizer"
    case = MegatronCase(distributed_optimizer=is_distributed, adam=True)
    launch(save_checkpoints, (Layout(2, 2), case, str(tmp_path), 3), ranks=2)
    for layout in (Layout(2, 2), Layout(4, 2), Layout(4, 4)) if is_distributed else (Layout(2, 2),):
        launch(compare_checkpoints, (layout, case, str(tmp_path)), ranks=layout.ranks)
