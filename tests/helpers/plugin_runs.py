"""What tests of the plugins of frameworks share: plans drawn at random, the routers of a process, and differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from helpers.megatron_runs import Layout, MegatronCase, Model, use_layout
from helpers.planner_steps import free_replicas
from helpers.random_plans import random_group_plans
from trimtab.planner import PlanSettings


def plans_at_random() -> Any:
    """A context in which sessions of nodes of two ranks get plans with replicas drawn at random, the same on all
    ranks."""
    from trimtab.runtime import step_planner

    rng = np.random.default_rng(0)

    def plans(loads: Any, schedule: Any, placement: Any, *_: Any, **__: Any) -> Any:
        return random_group_plans(rng, loads, schedule, placement, ranks_per_node=2)

    return mock.patch.object(step_planner, "plan_schedule", plans)


def eager_plans() -> Any:
    """A context in which replicas cost nothing, so that Trimtab's planner makes some in steps that are small."""
    from trimtab.runtime.step_planner import SessionPlanner

    make = SessionPlanner.of

    def make_planner(*args: Any, **options: Any) -> SessionPlanner:
        made = make(*args, **options)
        return replace(made, costs=free_replicas(made.cluster), settings=PlanSettings(1.0, 1))

    return mock.patch.object(SessionPlanner, "of", make_planner)


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


class ReplayActions:
    """What verl's RouterReplayHelper says of the routers of a chunk, of which ROLL and ms-swift have copies."""

    get_micro_batch_router_list: Callable[..., list[Any]]

    @classmethod
    def is_r2_record_action(cls, tf_config: Any, vp_rank: Any = None) -> bool:
        return cls._action(tf_config, vp_rank) == "RECORD"

    @classmethod
    def is_replay_forward_action(cls, tf_config: Any, vp_rank: Any = None) -> bool:
        return cls._action(tf_config, vp_rank) == "REPLAY_FORWARD"

    @classmethod
    def is_replay_backward_action(cls, tf_config: Any, vp_rank: Any = None) -> bool:
        return cls._action(tf_config, vp_rank) == "REPLAY_BACKWARD"

    @classmethod
    def _action(cls, tf_config: Any, vp_rank: Any) -> str:
        routers = cls.get_micro_batch_router_list(tf_config, vp_rank)
        return getattr(routers[0].router_replay_action, "name", "") if routers else ""


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
