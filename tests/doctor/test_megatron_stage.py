"""`trimtab doctor --gpu --full` on CPU ranks: routing as wanted, equal gradients, and a model that differs is found."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.rank_tests import runs_on_ranks
from trimtab.cli.main import main
from trimtab.doctor.gpu import megatron_stage
from trimtab.doctor.gpu.megatron_layers import LayerCase, MegatronLayers, start_megatron
from trimtab.doctor.gpu.megatron_stage import CPU_MODEL, cases, compare_case, time_products

SMALL = LayerCase(replace(CPU_MODEL, num_experts=16), tokens=256, max_over_mean=1.8, micro_batches=2)


@given(st.integers(2, 8), st.floats(1.0, 2.0), st.integers(0, 5))
@settings(max_examples=15)
def test_routing_has_different_experts_and_the_wanted_imbalance(ranks: int, ratio: float, seed: int) -> None:
    case = LayerCase(replace(CPU_MODEL, num_experts=8 * ranks), 512, ratio, layers=1)
    routing = case.routing(ranks, seed)
    ids_NK = np.concatenate([ids[:, 0] for of_rank in routing for ids in of_rank])
    assert all(len(set(row)) == case.model.top_k for row in ids_NK[:50].tolist())
    loads_R = np.bincount(ids_NK.ravel() // 8, minlength=ranks)
    assert loads_R.max() / loads_R.mean() == pytest.approx(ratio, abs=0.12)


def test_one_rank_has_no_imbalance_and_models_keep_the_experts_of_a_rank() -> None:
    assert {case.max_over_mean for case in cases(1, True)} == {1.0}
    assert {case.model.num_experts for case in cases(4, True)} == {64}
    assert len(cases(8, True)) == 16


def _start() -> None:
    parallel_state: Any = importlib.import_module("megatron.core.parallel_state")
    parallel_state.destroy_model_parallel()
    start_megatron()


@runs_on_ranks(patched="megatron")
def test_planned_layers_are_equal_and_timed() -> None:
    _start()
    finding = compare_case(SMALL, rounds=2)
    assert finding.status == "ok"
    figures: dict[str, Any] = finding.figures or {}
    assert figures["replicas"] > 0
    assert figures["max_over_mean_after"] < figures["max_over_mean_before"]
    assert {len(samples) for samples in figures["samples_s"].values()} == {2}


@pytest.mark.parametrize("value", [2.0, float("nan")])
@runs_on_ranks(patched="megatron")
def test_other_gradients_are_a_problem(value: float) -> None:
    class Changed(MegatronLayers):
        def planned_step(self, *args: Any) -> None:
            super().planned_step(*args)
            torch.mul(self.gradients()[0], value, out=self.gradients()[0])

    _start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_stage, "MegatronLayers", Changed)
        finding = compare_case(SMALL, rounds=1)
    assert finding.status == "problem"
    assert "allowed" in finding.text


@runs_on_ranks(patched="megatron")
def test_layers_of_a_case_have_equal_weights() -> None:
    """On a GPU, Megatron draws those of experts from a random state of its own."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    _start()
    drawn = []
    for _ in range(2):
        weights = [*MegatronLayers(SMALL).ddp.parameters()]
        with random.get_cuda_rng_tracker().fork(random.get_expert_parallel_rng_tracker_name()):
            drawn.append([*weights, torch.rand(4)])
    assert all(map(torch.equal, *drawn))


@runs_on_ranks(patched="megatron")
def test_products_are_timed_together_and_apart() -> None:
    _start()
    figures = time_products(SMALL, 2, rounds=2).figures or {}
    assert (figures["homes"], figures["replicas"]) == (8, 2)
    # The device is the host here.
    assert figures["one_s"] >= figures["one_host_s"] > 0
    assert figures["two_s"] >= figures["two_host_s"] > 0


def test_full_without_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--full"]) == 2
    assert "add --gpu" in capsys.readouterr().err
