"""The folder that trainers of the tiny model share."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.runs import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model and a place for a run."""
    folder = tmp_path_factory.mktemp("trainer")
    save_tiny_model(folder / "model")
    (folder / "out").mkdir()
    return folder
