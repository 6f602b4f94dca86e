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

from helpers.examples import nightly_except
from helpers.megatron_runs import LENGTH, VOCABULARY, Layout
from helpers.nemo_rl_stand_in import WORKERS, micro_batch, nemo_rl_modules
from helpers.plugin_runs import assert_close, model_on, plans_at_random
from helpers.random_choices import quotas_of_few
from helpers.rank_pool import on_ranks
from helpers.rank_tests import on_megatron_ranks
from trimtab.errors import InputError
from trimtab.integrations.nemo_rl import WORKER
from trimtab.runtime.live import balancer

CONFIG = {"router_replay": {"enabled": True}}
EXPERTS = 8


class Models:
    """Two equal models, and two steps of two micro-batches of two sequences with recorded routing."""

    def __init__(
        self, *, packed: bool = False, unknown: bool = False, layout: dict[str, Any] | None = None, **case: Any
    ) -> None:
        options = {"recompute": "uniform", "router_replay": True} | case
        self.plain, rng = model_on(Layout(dist.get_world_size(), 2, **layout or {}), **options)
        self.other = self.plain.copy()
        layers = sum(self.plain.config.moe_layer_freq)

        def batch() -> Any:
            tokens = torch.from_numpy(rng.integers(0, VOCABULARY, (2, LENGTH)))
            lengths = torch.from_numpy(rng.integers(LENGTH // 2, LENGTH + 1, 2))
            ids = rng.permuted(np.broadcast_to(np.arange(EXPERTS), (2, LENGTH, layers, EXPERTS)), axis=-1)[..., :2]
            # vLLM computes no routes of the last token.
            ids[np.arange(2), lengths - 1] = -1
            if unknown:
                # In a layer, or in all; other tokens read both.
                ids[0, 3, 0] = ids[1, 2] = -1
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
def balanced_worker(model: Any, text: str = "", config: Any = CONFIG) -> Iterator[Any]:
    with mock.patch.dict(os.environ, TRIMTAB_BALANCE=text), plans_at_random():
        # As NeMo-RL's RayWorkerBuilder finds the class.
        module, _, name = WORKER.rpartition(".")
        worker = getattr(import_module(module), name).actor(config, model=model)
        try:
            yield worker
        finally:
            worker._plugin.uninstall()


def plain_worker(model: Any, config: Any = CONFIG) -> Any:
    return import_module(WORKERS).MegatronPolicyWorkerImpl(config, model=model)


def compare(limit: float = 1e-5, mode: str = "", config: Any = CONFIG, **case: Any) -> list[dict[str, float]]:
    """Figures of the steps of a balanced worker, whose results are those of NeMo-RL."""
    with nemo_rl_modules():
        models = Models(**case)
        expected = models.results(plain_worker(models.plain, config))
        few = mock.patch.object(balancer, "choose_quotas", quotas_of_few)
        with few, balanced_worker(models.other, mode, config) as worker:
            found = models.results(worker)
        assert assert_close(found, expected, limit)["0 reference"] == 0
        assert worker.offloads == 2
    figures: list[dict[str, float]] = found["metrics"]
    return figures


CASES: dict[str, dict[str, Any]] = {
    "rows": {},
    "packed": {"packed": True},
    "packed, TP": {"packed": True, "layout": {"tensor": 2}},
    "packed, CP": {"packed": True, "layout": {"context": 2}},
    # Their router chooses for these tokens.
    "unknown routes": {"unknown": True},
    # Padding has the first experts then, as in NeMo-RL, and the last tokens are unknown.
    "a loss over all routes": {"balanced_routers": True},
}


@pytest.mark.parametrize("case", nightly_except(CASES, "packed, CP", "packed, TP", *list(CASES)[4:]))
@on_megatron_ranks
def test_steps_are_those_of_nemo_rl_s_own_replay(case: str) -> None:
    """Padding and last tokens are not read, so that these are known, though they have no routes."""
    for figures in compare(**CASES[case]):
        assert figures["replicas"] > 0
        assert figures["unplanned_micro_steps"] == 0
        assert (figures["mixed_instances"] > 0) == (case in list(CASES)[4:])
        assert figures["pool_bytes"] > 0
        assert "load_balancing_loss" in figures


@on_megatron_ranks
def test_chunks_of_a_step_are_reduced_once() -> None:
    """As the single controller streams them."""
    with nemo_rl_modules():
        models = Models()

        def step(worker: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            worker.begin_train_step()
            for data in models.steps:
                worker.train_microbatch(data)
            metrics = worker.finish_train_step()
            parameters = worker.of_test.named_parameters()
            return {name: each.main_grad.clone() for name, each in parameters.items()}, metrics

        expected, _ = step(plain_worker(models.plain))
        with balanced_worker(models.other) as worker:
            found, metrics = step(worker)
        assert_close(found, expected)
        assert metrics["moe_metrics"]["replicas"] > 0


@on_megatron_ranks
def test_shadow_changes_no_bit() -> None:
    assert all(figures["replicas"] > 0 for figures in compare(0, "mode=shadow"))


@on_megatron_ranks
def test_live_mode_needs_no_recorded_routing() -> None:
    steps = compare(mode="mode=live", config={"router_replay": {"enabled": False}}, router_replay=False)
    assert all(figures["max_vio_before"] > 0 for figures in steps)


@pytest.mark.longer
def test_stages_of_a_pipeline() -> None:
    on_ranks(_run_pipeline, (), ranks=4, patched="megatron")


def _run_pipeline() -> None:
    """Each stage has the routes of its own layers."""
    assert all(figures["replicas"] > 0 for figures in compare(layout={"pipeline": 2}))


@on_megatron_ranks
def test_routes_are_cut_by_layer_and_what_can_t_be_cut_is_an_error_on_all_ranks() -> None:
    with nemo_rl_modules():
        models = Models()
        with balanced_worker(models.other) as worker:
            batch = models.steps[0][0]
            if dist.get_rank():
                batch.routed_experts_cp_sharded = batch.routed_experts_cp_sharded[:, :, :-1]
            with pytest.raises(InputError, match="routing of micro-batch 0 can't be read"):
                worker.get_logprobs(data=[batch])
