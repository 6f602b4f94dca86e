"""NeMo-RL's plugin on stand-ins of its modules, or with NEMO_RL=folder its own: as its own replay of routing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.nemo_rl_stand_in import WORKERS, micro_batch, nemo_rl_modules
from helpers.random_plans import random_group_plans
from helpers.rank_pool import RankPool, shared_pool
from helpers.rank_tests import runs_on_ranks

State = dict[str, Any]
CONFIG = {"router_replay": {"enabled": True}}
EXPERTS = 8


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = shared_pool(2, "megatron")
    yield pool
    pool.forget()


class Models:
    """Two equal models, and two steps of two micro-batches of two sequences with recorded routing."""

    def __init__(self, *, packed: bool = False, unknown: bool = False) -> None:
        from helpers.megatron_runs import LENGTH, VOCABULARY, Layout, MegatronCase, Model, use_layout

        use_layout(Layout(2, 2))
        self.plain = Model(Layout(2, 2), MegatronCase(router_replay=True, recompute="uniform"))
        self.other = self.plain.copy()
        rng = np.random.default_rng(dist.get_rank())
        layers = len(list(self.plain.moe_layers()))

        def batch() -> Any:
            tokens = torch.from_numpy(rng.integers(0, VOCABULARY, (2, LENGTH)))
            lengths = torch.from_numpy(rng.integers(LENGTH // 2, LENGTH + 1, 2))
            ids = rng.permuted(np.broadcast_to(np.arange(EXPERTS), (2, LENGTH, layers, EXPERTS)), axis=-1)[..., :2]
            # vLLM computes no routes of the last token.
            ids[np.arange(2), lengths - 1] = -1
            if unknown:
                ids[0, 3, 0] = -1
            return micro_batch(tokens, lengths, torch.from_numpy(ids.astype(np.int8)), packed=packed)

        self.steps = [[batch(), batch()] for _ in range(2)]

    def results(self, worker: Any) -> dict[str, Any]:
        """Losses and gradients by name, of two steps as grpo_train has them, and its metrics."""
        found: dict[str, Any] = {"metrics": []}
        for number, data in enumerate(self.steps):
            found[f"{number} log-probs"] = worker.get_logprobs(data=data)
            found[f"{number} reference"] = worker.get_reference_policy_logprobs(data=data)
            metrics = worker.train(data)
            found[f"{number} loss"] = metrics["global_loss"]
            found["metrics"].append(metrics["moe_metrics"])
            parameters = worker.of_test.named_parameters()
            found |= {f"{number} {name}": parameter.main_grad.clone() for name, parameter in parameters.items()}
            worker.of_test.optimizer.step()
            worker.offload_before_refit()
        return found


@contextmanager
def random_plans() -> Iterator[None]:
    from trimtab.runtime import step_planner

    rng = np.random.default_rng(0)

    def plans(loads: Any, schedule: Any, placement: Any, *_: Any, **__: Any) -> Any:
        return random_group_plans(rng, loads, schedule, placement, ranks_per_node=2)

    with mock.patch.object(step_planner, "plan_schedule", plans):
        yield


@contextmanager
def balanced_worker(model: Any, text: str = "", config: Any = CONFIG) -> Iterator[Any]:
    with mock.patch.dict(os.environ, TRIMTAB_BALANCE=text), random_plans():
        worker = import_module("trimtab.integrations.nemo_rl_worker").BalancedPolicyWorkerImpl(config, model=model)
        try:
            yield worker
        finally:
            worker._plugin.uninstall()


def plain_worker(model: Any, config: Any = CONFIG) -> Any:
    return import_module(WORKERS).MegatronPolicyWorkerImpl(config, model=model)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Relative, by name."""
    errors = {}
    for name in expected.keys() - {"metrics"}:
        one, other = (torch.as_tensor(each, dtype=torch.float64) for each in (found[name], expected[name]))
        errors[name] = float((one - other).norm() / other.norm().clamp(min=1e-6))
    return errors


@pytest.mark.parametrize("packed", [False, True])
@runs_on_ranks()
def test_steps_are_those_of_nemo_rl_s_own_replay(state: State, packed: bool) -> None:
    """Padding and last tokens are not read, so that these are known, though they have no routes."""
    del state
    with nemo_rl_modules():
        models = Models(packed=packed)
        expected = models.results(plain_worker(models.plain))
        with balanced_worker(models.other) as worker:
            found = models.results(worker)
        errors = differences(found, expected)
        assert errors["0 reference"] == 0
        assert max(errors.values()) < 1e-5, max(errors, key=errors.__getitem__)
        for metrics in found["metrics"]:
            assert metrics["replicas"] > 0
            assert metrics["unplanned_micro_steps"] == metrics["mixed_instances"] == 0
            assert metrics["pool_bytes"] > 0
            assert "load_balancing_loss" in metrics
        assert worker.offloads == 2
