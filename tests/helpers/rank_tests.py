"""`runs_on_ranks`: tests whose body runs on ranks of `shared_pool`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch.distributed as dist

from helpers.rank_pool import on_ranks

Test = Callable[..., None]


def runs_on_ranks(ranks: int = 2, patched: str = "") -> Callable[[Test], Test]:
    """A decorator of tests: the ranks run the body, with the fixtures and parameters of the test.

    A test with a parameter `ways` runs in them, see `helpers.accelerator`.
    A body whose first parameter is `state` runs on the ranks of the fixture `pool`, and gets their dictionary.

    Args:
        ranks, patched: as of `shared_pool`.
    """

    def decorate(body: Test) -> Test:
        place, signature = (body.__module__, body.__name__), inspect.signature(body)

        def test(**arguments: Any) -> None:
            if "state" in signature.parameters:
                arguments.pop("pool").call(_run, *place, arguments)
            else:
                ways = arguments.get("ways", "")
                on_ranks(_run_without_state, (*place, arguments), ranks=ranks, patched=patched, ways=ways)

        fixtures = [
            each.replace(name="pool" if each.name == "state" else each.name) for each in signature.parameters.values()
        ]
        vars(test).update(body=body, __signature__=signature.replace(parameters=fixtures))
        test.__module__, test.__name__, test.__doc__ = *place, body.__doc__
        return test

    return decorate


on_megatron_ranks = runs_on_ranks(2, "megatron")


def of_all_ranks(value: Any) -> list[Any]:
    """All ranks' values. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _run(state: dict[str, Any], module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(import_module(module), name).body(state, **arguments)


def _run_without_state(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(import_module(module), name).body(**arguments)
