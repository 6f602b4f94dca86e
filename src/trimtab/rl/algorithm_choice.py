"""`make_algorithm`: the algorithm of a run by its name."""

from __future__ import annotations

from trimtab.rl.algorithm import Algorithm
from trimtab.rl.grpo import GRPO


def make_algorithm(name: str) -> Algorithm:
    """The algorithm `name`, one of `config.ALGORITHMS`."""
    return {"grpo": GRPO}[name]()
