"""What tests of the plugins of frameworks share: plans drawn at random, the routers of a process, and differences."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch

from helpers.megatron_runs import Layout, MegatronCase, Model, use_layout
from helpers.random_plans import random_group_plans


def plans_at_random() -> Any:
    """A context in which sessions of nodes of two ranks get plans with replicas drawn at random, the same on all
    ranks."""
    from trimtab.runtime import step_planner

    rng = np.random.default_rng(0)

    def plans(loads: Any, schedule: Any, placement: Any, *_: Any, **__: Any) -> Any:
        return random_group_plans(rng, loads, schedule, placement, ranks_per_node=2)

    return mock.patch.object(step_planner, "plan_schedule", plans)


def model_on(layout: Layout, **case: Any) -> tuple[Model, np.random.Generator]:
    """A model on new process groups, and random numbers that are the same on ranks with the same data."""
    from megatron.core import parallel_state

    use_layout(layout)
    return Model(layout, MegatronCase(**case)), np.random.default_rng(parallel_state.get_data_parallel_rank())


def use_routers(*models: Any) -> None:
    """The process has the routers of these models, in this order, as a process of a framework."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    replays = [layer.router.router_replay for model in models for layer in model.moe_layers()]
    RouterReplay.global_router_replay_instances[:] = [getattr(replay, "plain", replay) for replay in replays]


def gradients(step: int, parameters: Any) -> dict[str, torch.Tensor]:
    """The `main_grad`s of parameters by name, before an optimizer step uses them."""
    return {f"{step} grad {name}": parameter.main_grad.clone() for name, parameter in parameters.items()}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Relative differences of numbers and tensors, by name; `metrics` are not compared."""
    assert found.keys() == expected.keys()
    errors = {}
    for name in expected.keys() - {"metrics"}:
        one, other = (torch.as_tensor(each, dtype=torch.float64) for each in (found[name], expected[name]))
        # A pipeline stage without a loss has none on both sides.
        assert one.shape == other.shape
        errors[name] = float((one - other).norm() / other.norm().clamp(min=1e-6))
    return errors


def assert_close(found: dict[str, Any], expected: dict[str, Any], limit: float = 1e-5) -> dict[str, float]:
    """Assert that no difference is above a limit. Returns the differences."""
    errors = differences(found, expected)
    assert max(errors.values()) <= limit, max(errors, key=errors.__getitem__)
    return errors
