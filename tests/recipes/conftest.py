"""The folder that trainers of the tiny model share. Tests that use it are `nightly`; `make test-recipes` runs all."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` has the other tests, and a short run of each recipe."""
    for item in items:
        if item.path.parent == Path(__file__).parent and "folder" in getattr(item, "fixturenames", ()):
            item.add_marker("nightly")
