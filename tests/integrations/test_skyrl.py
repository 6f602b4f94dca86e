"""SkyRL's plugin on stand-ins of its modules, or with SKYRL=folder its own slices: as its own replay of routing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from helpers.megatron_runs import LENGTH, Layout
from helpers.plugin_runs import assert_close, model_on, plans_at_random, use_routers
from helpers.random_choices import quotas_of_few
from helpers.rank_pool import on_ranks
from helpers.rank_tests import on_megatron_ranks
from helpers.skyrl_stand_in import WORKERS, random_micro_batch, skyrl_modules, worker_config
from trimtab.errors import InputError
from trimtab.integrations.skyrl_hook import replace_worker_when_imported
from trimtab.runtime.live import balancer

EXPERTS = 8


class Models:
    """Two equal models, and two steps of three micro-batches with recorded routing."""

    def __init__(self, *, layout: dict[str, Any] | None = None, **case: Any) -> None:
        options = {"recompute": "uniform", "router_replay": True, "distributed_optimizer": True} | case
        self.plain, rng = model_on(Layout(dist.get_world_size(), 2, **layout or {}), **options)
        self.other = self.plain.copy()
        layers = self.plain.config.num_layers
        self.steps = [[random_micro_batch(rng, LENGTH, EXPERTS, layers) for _ in range(3)] for _ in range(2)]

    def results(self, worker: Any) -> dict[str, Any]:
        """Losses and gradients by name, of two steps as RayPPOTrainer has them with all models on the same devices, and
        metrics. A step has two calls of `forward_backward`, whose gradients are reduced once."""
        use_routers(worker.of_test)
        found: dict[str, Any] = {"metrics": []}
        for number, data in enumerate(self.steps):
            for micro_batch, entropies in enumerate(worker.forward(data).loss_fn_outputs):
                found[f"{number} entropies {micro_batch}"] = entropies
            for part, batches in enumerate((data[:2], data[2:])):
                metrics = worker.forward_backward(batches, loss_fn=None).metrics
                found[f"{number} loss {part}"] = metrics["policy_loss"]
                found["metrics"].append(metrics)
            worker.optim_step()
            found |= {f"{number} {name}": gradient for name, gradient in worker.reduced.items()}
            worker.offload_to_cpu(offload_optimizer=True, offload_model=True)
            worker.backload_to_gpu()
        parameters = worker.of_test.named_parameters()
        return found | {f"parameter {name}": each.data.clone() for name, each in parameters.items()}


@contextmanager
def balanced_worker(model: Any, text: str = "", **config: Any) -> Iterator[Any]:
    """Of the class that SkyRL imports after the hook of its process ran."""
    sys.modules.pop("trimtab.integrations.skyrl_worker", None)
    replace_worker_when_imported()
    with mock.patch.dict(os.environ, TRIMTAB_BALANCE=text), plans_at_random():
        worker = import_module(WORKERS).PolicyWorker.actor(cfg=worker_config(**config))
        worker.init_model(model)
        try:
            yield worker
        finally:
            worker._plugin.uninstall()


def plain_worker(model: Any, **config: Any) -> Any:
    worker = import_module(WORKERS).MegatronPolicyWorkerBase(cfg=worker_config(**config))
    worker.init_model(model)
    return worker


def compare(models: Models, limit: float = 1e-5, mode: str = "", **config: Any) -> list[dict[str, float]]:
    """Figures of the calls of a balanced worker, whose results are those of SkyRL."""
    expected = models.results(plain_worker(models.plain, **config))
    few = mock.patch.object(balancer, "choose_quotas", quotas_of_few)
    with few, balanced_worker(models.other, mode, **config) as worker:
        found = models.results(worker)
    assert_close(found, expected, limit)
    figures: list[dict[str, float]] = found["metrics"]
    return figures


@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2}, pytest.param({"context": 2}, marks=pytest.mark.nightly)], ids=["", "TP", "CP"]
)
@on_megatron_ranks
def test_steps_are_those_of_skyrl_s_own_replay(layout: dict[str, Any]) -> None:
    """Padding and last tokens are not read, and the routes of all others are those that SkyRL replays."""
    with skyrl_modules():
        for figures in compare(Models(layout=layout)):
            assert figures["moe/replicas"] > 0
            assert figures["moe/unplanned_micro_steps"] == figures["moe/mixed_instances"] == 0
            assert figures["memory/pool_bytes"] > 0


@on_megatron_ranks
def test_a_loss_over_all_routes_keeps_those_of_padding() -> None:
    with skyrl_modules():
        compare(Models(balanced_routers=True))


@on_megatron_ranks
def test_a_pass_with_a_micro_batch_without_routes_is_that_of_skyrl() -> None:
    """Its routers choose as if nothing had been read."""
    with skyrl_modules():
        models = Models()
        models.steps[0] = [batch | {"rollout_expert_indices": None} for batch in models.steps[0]]
        models.steps[1][0] |= {"rollout_expert_indices": None}
        replicas = [figures.get("moe/replicas", 0) for figures in compare(models)]
        # The last call has routes in all of its micro-batches.
        assert replicas[:3] == [0, 0, 0]
        assert replicas[3] > 0


@on_megatron_ranks
def test_slots_and_groups_are_given_back_when_the_model_is_offloaded() -> None:
    with skyrl_modules():
        models = Models()
        with balanced_worker(models.other) as worker:
            use_routers(models.other)
            worker.forward(models.steps[0])
            (session,) = worker._plugin.adapter.sessions
            assert session.session.topology.has_groups
            worker.offload_to_cpu()
            assert not session.session.topology.has_groups
            worker.backload_to_gpu()


@on_megatron_ranks
def test_shadow_changes_no_bit() -> None:
    with skyrl_modules():
        assert all(figures["moe/replicas"] > 0 for figures in compare(Models(), 0, "mode=shadow"))


@on_megatron_ranks
def test_live_mode_needs_no_recorded_routing() -> None:
    with skyrl_modules():
        calls = compare(Models(router_replay=False), mode="mode=live", replays=False)
        assert all(figures["moe/max_vio_before"] > 0 for figures in calls)


@pytest.mark.longer
@pytest.mark.parametrize("dense_stage", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_stages_of_a_pipeline(dense_stage: bool) -> None:
    on_ranks(_run_pipeline, (dense_stage,), ranks=4, patched="megatron")


def _run_pipeline(dense_stage: bool) -> None:
    """Each stage has the routes of its own layers, of which the second may have none."""
    with skyrl_modules():
        models = Models(layout={"pipeline": 2}, dense_stage=dense_stage)
        replicas = sum(figures.get("moe/replicas", 0) for figures in compare(models))
        assert (replicas > 0) == any(True for _ in models.other.moe_layers())


@on_megatron_ranks
def test_routes_that_skyrl_can_t_slice_are_an_error_on_all_ranks() -> None:
    with skyrl_modules():
        models = Models()
        with balanced_worker(models.other) as worker:
            use_routers(models.other)
            batch = models.steps[0][0]
            if dist.get_rank():
                batch["rollout_expert_indices"] = batch["rollout_expert_indices"][:, :, :1]
            with pytest.raises(InputError, match="routing of micro-batch 0 can't be read"):
                worker.forward([batch])
