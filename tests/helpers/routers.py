"""Small models of every family, and what their routers answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from helpers.moe_families import TOP_K, random_model, router_of, small_config
from trimtab.integrations.transformers import moe_blocks, recording
from trimtab.integrations.transformers.passes import fetch_calls

PAD = 0
PROMPTS = ([3, 1, 4, 1, 5], [2, 7], [9, 8, 6])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower with several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_of(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return random_model(small_config(model_type, **changes), dtype).eval()


def routers(model: Any) -> list[Any]:
    return [router_of(block) for block in moe_blocks(model).values()]


@contextmanager
def choices(model: Any) -> Iterator[list[list[torch.Tensor]]]:
    """What each router answers of itself, call by call: computed again by its class, from the input it was given."""
    seen: list[list[torch.Tensor]] = [[] for _ in routers(model)]

    def note(layer: int, router: Any, hidden: torch.Tensor) -> None:
        with torch.no_grad():
            seen[layer].append(type(router).forward(router, hidden)[2])

    with ExitStack() as stack:
        for layer, router in enumerate(routers(model)):
            hook = router.register_forward_pre_hook(lambda r, args, layer=layer: note(layer, r, args[0]))
            stack.callback(hook.remove)
        yield seen


@contextmanager
def fetched_calls() -> Iterator[list[int]]:
    """The number of recorded calls in each copy to the host."""
    numbers: list[int] = []

    def noted(calls: Any, dtype: Any) -> None:
        numbers.append(len(calls))
        fetch_calls(calls, dtype)

    with mock.patch.object(recording, "fetch_calls", noted):
        yield numbers


def left_padded(prompts: Any = PROMPTS) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    tokens = torch.tensor([[PAD] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return tokens, mask


def joined(seen: list[list[torch.Tensor]], rows: int) -> np.ndarray[Any, Any]:
    """`[rows, t, L, K]` of all calls one after another."""
    layers = [torch.cat([ids.reshape(rows, -1, TOP_K) for ids in calls], dim=1) for calls in seen]
    return torch.stack(layers, dim=2).numpy()
