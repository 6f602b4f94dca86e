"""ms-swift's plugin on a stand-in of its trainer: as its own replay; what is refused; what `--external_plugins` imports."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from copy import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers import ms_swift_stand_in as stand_in
from helpers.ms_swift_stand_in import arguments, import_external_file, ms_swift, random_batch, use_routers
from helpers.random_plans import random_group_plans
from helpers.rank_pool import RankPool, on_ranks, shared_pool
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError
from trimtab.integrations.ms_swift import PLUGIN_FILE, read_tokens

State = dict[str, Any]
STEPS, MICRO_BATCHES = 2, 2


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = shared_pool(2, "megatron")
    yield pool
    pool.forget()


class Run:
    """A trainer and its steps: log-probabilities of reference and actor, then an optimizer step.

    Attributes:
        planned: replicas of each pass of the actor's log-probabilities that was planned.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.planned: list[int] = []

    def steps(self, batches: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Log-probabilities, losses and gradients, by name. Memory is freed before, as during generation."""
        tests = self.trainer.args.of_tests
        use_routers(tests.actor, tests.reference)
        found: dict[str, Any] = {}
        for step, batch in enumerate(batches):
            self._sleep()
            micro_batches = []
            for number, each in enumerate(batch):
                data = self.trainer._maybe_compute_logps(copy(each) | {"grpo_batch": copy(each["grpo_batch"])})
                is_read = each["labels"].roll(-1, -1) != -100
                for name in ("ref", "old"):
                    values = getattr(data["grpo_batch"], f"{name}_per_token_logps")
                    if values is not None:
                        mask = _of_this_rank(is_read) if values.shape != is_read.shape else is_read
                        found[f"{step} {name} {number}"] = values.masked_fill(~mask, 0)
                micro_batches.append(data)
                self.planned += [session.report.replicas for session in sessions(self) if session.report]
            # The optimizer's step follows in the same call.
            optimizer = self.trainer.optimizer
            with mock.patch.object(optimizer, "step", partial(self._keep, found, step, optimizer.step)):
                self.trainer.run_train_step(iter(micro_batches))
        found["loss"] = torch.tensor([step["loss"] for step in self.trainer.logged[-STEPS:]])
        return found

    def _sleep(self) -> None:
        models = self.trainer.wrapped_models
        if models[0].ddp_config.use_distributed_optimizer:
            trainers = sys.modules[stand_in.TRAINERS]
            trainers.offload_megatron_model_to_cpu(models)
            trainers.load_megatron_model_to_gpu(models)

    def _keep(self, found: dict[str, Any], step: int, plain: Any) -> Any:
        parameters = self.trainer.args.of_tests.actor.named_parameters()
        found |= {f"{step} grad {name}": parameter.main_grad.clone() for name, parameter in parameters.items()}
        return plain()


def _of_this_rank(mask_BT: torch.Tensor) -> torch.Tensor:
    """A mask of a batch that is cut for context parallelism; all of its sequences are padded to 4 tokens."""
    return stand_in.split_cp_inputs(mask_BT, torch.tensor([0, 16]), 1)


class Runs:
    """Runs of equal models on the same batches, in ms-swift as it is and with the plugin.

    Attributes:
        other: the last run with the plugin.
    """

    other: Run

    def __init__(self, layout: Any = None, **case: Any) -> None:
        from megatron.core import parallel_state

        from helpers.megatron_runs import LENGTH, Layout, MegatronCase, Model, use_layout

        layout = layout or Layout(2, 2)
        use_layout(layout)
        case = {"double": True, "recompute": "uniform", "router_replay": True} | case
        self.model = Model(layout, MegatronCase(**case))
        self.reference = self.model.copy()
        stand_in.with_packed_mask(self.reference)
        rng = np.random.default_rng(parallel_state.get_data_parallel_rank())
        layers = self.model.config.moe_layer_freq
        self.batches = [
            [random_batch(rng, LENGTH, layers, layout.context) for _ in range(MICRO_BATCHES)] for _ in range(STEPS)
        ]

    def trainer(self, **more: Any) -> Any:
        actor = self.model.copy()
        stand_in.with_packed_mask(actor)
        trainer = sys.modules[stand_in.GRPO].MegatronGRPOTrainer
        return trainer(arguments(actor, self.reference, **more), SimpleNamespace(padding_free=True))

    def expected(self, **more: Any) -> dict[str, Any]:
        return Run(self.trainer(**more)).steps(self.batches)

    @contextmanager
    def balanced(self, text: str = "", **more: Any) -> Iterator[Run]:
        """A trainer of a process with the flag, and replicas drawn at random."""
        from trimtab.runtime import step_planner

        rng = np.random.default_rng(0)

        def plans(loads: Any, schedule: Any, placement: Any, *_: Any, **__: Any) -> Any:
            return random_group_plans(rng, loads, schedule, placement, ranks_per_node=2)

        trainer = sys.modules[stand_in.BASE].BaseMegatronTrainer
        with mock.patch.dict(os.environ, TRIMTAB_BALANCE=text), mock.patch.object(trainer, "__init__", trainer.__init__):
            sys.modules.pop(PLUGIN_FILE.stem, None)
            import_external_file(PLUGIN_FILE)
            self.other = Run(self.trainer(**more))
        try:
            with mock.patch.object(step_planner, "plan_schedule", plans):
                yield self.other
        finally:
            self.other.trainer.trimtab_plugin.uninstall()


def sessions(run: Run) -> list[Any]:
    plugin = getattr(run.trainer, "trimtab_plugin", None)
    return [] if plugin is None or plugin.adapter is None else plugin.adapter.sessions


def errors_of(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Relative differences, by name."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-6))
        for name, value in expected.items()
    }


def figures(run: Run) -> list[dict[str, float]]:
    return [{name: value for name, value in step.items() if "/" in name} for step in run.trainer.logged[-STEPS:]]


def compare(layout: Any = None, largest: float = 1e-11, mode: str = "R3", **case: Any) -> None:
    with ms_swift():
        runs = Runs(layout, **case)
        expected = runs.expected(router_replay_mode=mode)
        with runs.balanced(router_replay_mode=mode):
            found = runs.other.steps(runs.batches)
            assert not any(session.have_moved for session in sessions(runs.other))
        errors = errors_of(found, expected)
        print(max(errors.values()), max(errors, key=errors.__getitem__))
        assert max(errors.values()) < largest, max(errors, key=errors.__getitem__)
        assert all(error == 0 for name, error in errors.items() if name.startswith("0 ref"))
        # Each pass has its own plan.
        assert (min(runs.other.planned[:MICRO_BATCHES], default=0) > 0) == (mode == "R3")
        for step in figures(runs.other):
            assert step["moe/replicas"] > 0
            assert step["moe/unplanned_micro_steps"] == step["moe/mixed_instances"] == 0
            assert step["memory/pool_bytes"] > 0


@runs_on_ranks()
def test_steps_are_those_of_ms_swift_s_own_replay(state: State) -> None:
    """The pass of log-probabilities and training, with padding that ms-swift replays as expert 0."""
    del state
    compare()


@runs_on_ranks()
def test_memory_that_is_freed_during_generation(state: State) -> None:
    """In float32, with the distributed optimizer, which the offload needs."""
    del state
    compare(largest=1e-5, double=False, distributed_optimizer=True)


@runs_on_ranks()
def test_routes_that_the_trainer_records_are_replayed_and_planned(state: State) -> None:
    del state
    compare(mode="R2")


@runs_on_ranks()
def test_tokens_are_cut_as_ms_swift_does_with_tensor_parallelism(state: State) -> None:
    from helpers.megatron_runs import Layout

    del state
    compare(Layout(2, 2, tensor=2))


@runs_on_ranks()
def test_tokens_are_cut_as_ms_swift_does_with_context_parallelism(state: State) -> None:
    from helpers.megatron_runs import Layout

    del state
    compare(Layout(2, 2, context=2))


@pytest.mark.longer
def test_stages_of_a_pipeline() -> None:
    on_ranks(_run_pipeline, (), ranks=4, patched="megatron")


def _run_pipeline() -> None:
    from helpers.megatron_runs import Layout

    compare(Layout(4, 2, pipeline=2))
