"""Figures that a function measures on launched ranks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trimtab.files import write_json
from trimtab.launch import launch


def measure_on_ranks(measure: Callable[..., dict[str, Any]], args: tuple[Any, ...], *, ranks: int) -> dict[str, Any]:
    """Call `measure(*args)` on every rank, and return what rank 0 returns. Its content must fit JSON.

    Under torchrun this process is one of the ranks; ranks other than 0 get an empty dictionary.

    Raises:
        InputError: as a rank raised it.
        RankFailedError: naming a rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        launch(_write_figures, (measure, args, path), ranks=ranks)
        figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return figures


def _write_figures(measure: Callable[..., dict[str, Any]], args: tuple[Any, ...], path: Path) -> None:
    figures = measure(*args)
    if dist.get_rank() == 0:
        write_json(path, figures)
