"""ROLL's plugin on a stand-in of its strategy and workers: as its own replay; what is refused."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.random_plans import random_group_plans
from helpers.rank_pool import RankPool, on_ranks, shared_pool
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from helpers.roll_stand_in import (
    FLAG,
    DataProto,
    Strategy,
    Worker,
    log_probs,
    random_batch,
    roll,
    some_loss,
    use_routers,
    with_causal_mask,
    worker_config,
)
from trimtab.errors import InputError

State = dict[str, Any]
STEPS, MICRO_BATCHES = 2, 2


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = shared_pool(2, "megatron")
    yield pool
    pool.forget()


class Run:
    """A model and the steps of a rollout: log-probabilities of reference and actor, then optimizer steps."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.strategy: Any = None
        self.logged: list[dict[str, Any]] = []

    def make_strategy(self, config: Any) -> Strategy:
        self.strategy = Strategy(self.model, config)
        return self.strategy

    def rollout(self, batches: list[DataProto]) -> dict[str, Any]:
        """Log-probabilities, losses and gradients, by name."""
        use_routers(self.model)
        found: dict[str, Any] = {}
        for step, batch in enumerate(batches):
            self.strategy.load_states()
            without = DataProto({name: part for name, part in batch.batch.items() if name != "routed_experts"})
            for name, each in {"unrecorded": without, "recorded": batch}.items():
                results = self.strategy.forward_step(batch=each, forward_func=log_probs)
                for number, result in enumerate(results):
                    found[f"{step} {name} {number}"] = result["log_probs"]
            self.model.zero()
            # The optimizer's step follows in the same call.
            step_of = self.strategy.optimizer.step
            with mock.patch.object(self.strategy.optimizer, "step", lambda step=step, plain=step_of: self._keep(found, step, plain)):
                self.logged.append(self.strategy.train_step(batch=batch, loss_func=some_loss))
            self.strategy.offload_states()
        self.strategy.load_states()
        found["loss"] = torch.tensor([step.get("actor/pg_loss", [0.0]) for step in self.logged[-STEPS:]])
        return found

    def _keep(self, found: dict[str, Any], step: int, plain: Any) -> Any:
        parameters = self.model.named_parameters()
        found |= {f"{step} grad {name}": parameter.main_grad.clone() for name, parameter in parameters.items()}
        return plain()


class Pair:
    """Two equal models: one in ROLL as it is, one in ROLL with the plugin."""

    def __init__(self, layout: Any = None) -> None:
        from megatron.core import parallel_state

        from helpers.megatron_runs import LENGTH, Layout, MegatronCase, Model, use_layout

        layout = layout or Layout(2, 2)
        use_layout(layout)
        self.plain = Run(Model(layout, MegatronCase(double=True, recompute="uniform", router_replay=True)))
        self.other = Run(self.plain.model.copy())
        for run in (self.plain, self.other):
            with_causal_mask(run.model, LENGTH)
        rng = np.random.default_rng(parallel_state.get_data_parallel_rank())
        layers = self.plain.model.config.num_layers
        self.batches = [random_batch(rng, MICRO_BATCHES, LENGTH, 8, layers) for _ in range(STEPS)]

    def expected(self, **config: Any) -> dict[str, Any]:
        self.plain.make_strategy(worker_config(**config))
        return self.plain.rollout(self.batches)

    @contextmanager
    def balanced(self, text: str = "", name: str = "ActorWorker", **config: Any) -> Iterator[Any]:
        """The worker with the plugin, initialized as ROLL does, and replicas drawn at random."""
        from trimtab.runtime import step_planner

        rng = np.random.default_rng(0)

        def plans(loads: Any, schedule: Any, placement: Any, *_: Any, **__: Any) -> Any:
            return random_group_plans(rng, loads, schedule, placement, ranks_per_node=2)

        values = worker_config(**config)
        with (
            mock.patch.dict(os.environ, TRIMTAB_BALANCE=text),
            mock.patch.object(Worker, "make_strategy", lambda: self.other.make_strategy(values)),
        ):
            worker = getattr(import_module("trimtab.integrations.roll"), name)(values)
            worker.initialize(None)
        try:
            with mock.patch.object(step_planner, "plan_schedule", plans):
                yield worker
        finally:
            self.other.strategy.load_states()
            for session in sessions(worker):
                session.remove()


def sessions(worker: Any) -> list[Any]:
    plugin = worker.trimtab_plugin
    return [] if plugin.adapter is None else plugin.adapter.sessions


def errors_of(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Relative differences, by name."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-6))
        for name, value in expected.items()
    }


def figures(run: Run) -> list[dict[str, float]]:
    start = "actor_train/"
    return [{name.removeprefix(start): value for name, value in step.items()} for step in run.logged[-STEPS:]]


def compare(layout: Any = None) -> None:
    with roll():
        pair = Pair(layout)
        expected = pair.expected()
        with pair.balanced() as worker:
            found = pair.other.rollout(pair.batches)
            assert not any(session.have_moved for session in sessions(worker))
        errors = errors_of(found, expected)
        assert max(errors.values()) < 1e-11, max(errors, key=errors.__getitem__)
        assert all(error == 0 for name, error in errors.items() if name.startswith("0 unrecorded"))
        for step in figures(pair.other):
            assert step["moe/replicas"] > 0
            assert step["moe/unplanned_micro_steps"] == step["moe/mixed_instances"] == 0
            assert step["memory/pool_bytes"] > 0


@runs_on_ranks()
def test_a_rollout_is_that_of_roll_s_own_replay(state: State) -> None:
    """Memory of parameters and gradients changes between the steps, and what was not recorded is not planned."""
    del state
    compare()


@runs_on_ranks()
def test_tokens_are_cut_as_roll_does_with_tensor_parallelism(state: State) -> None:
    from helpers.megatron_runs import Layout

    del state
    compare(Layout(2, 2, tensor=2))
