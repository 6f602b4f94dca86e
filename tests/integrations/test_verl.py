"""verl 0.9.1's own Megatron engine, balanced by its flag, on two CPU ranks: `make test-verl`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from helpers.rank_pool import on_ranks
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from trimtab.errors import InputError

pytestmark = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed; make test-verl runs these")
if find_spec("verl") is not None:
    from helpers.verl_engine import Comparison, Run, VerlCase, batch, compare, engine_of, engine_pass, loss, make_engine
    from helpers.verl_fakes import prepare

on_verl_ranks = partial(runs_on_ranks, patched="verl")
FLOAT32, BFLOAT16 = 1e-5, 3e-2


def compared(ranks: int = 2, **case: Any) -> list[Comparison]:
    """The comparisons of all ranks, of which all kinds of tensors are equal."""
    comparisons: list[Comparison] = on_ranks(compare, (VerlCase(**case),), ranks=ranks, patched="verl")
    for comparison in comparisons:
        outputs = {"log_probs", "loss"} if comparison.metrics else set()
        assert comparison.errors.keys() == {"grad", "norm", "weight"} | outputs
        tolerance = BFLOAT16 if case.get("dtype") == "bfloat16" else FLOAT32
        assert max(comparison.errors.values()) < tolerance, comparison
    return comparisons


def test_exact_plans() -> None:
    for found in compared(trimtab={"slots_per_rank": 6}, exact=True):
        assert found.planned == (4, 0)
        assert found.replicas > 0
        assert found.mixed == found.unplanned == 0
        (after,) = found.metrics["actor/moe/max_vio_after"]
        (before,) = found.metrics["actor/moe/max_vio_before"]
        assert after < 0.01 < before


@pytest.mark.parametrize(("missing", "by_length"), [(0, True), (1, True), (1, False)])
def test_random_replicas_with_rows_that_nobody_reads(missing: int, by_length: bool) -> None:
    for found in compared(missing=missing, by_length=by_length):
        assert found.planned == (4, 0)
        assert found.replicas > 20
        assert found.mixed == found.unplanned == 0


def test_random_replicas_where_all_rows_are_read() -> None:
    """The router chooses for rows that verl does not replay, and their log-probs are verl's too."""
    for found in compared(reads_all=True):
        assert found.replicas > 20
        assert found.mixed > 0
        assert found.unplanned == 0


def test_full_recompute() -> None:
    for found in compared(recompute=True):
        assert found.replicas > 20


def test_offload() -> None:
    for found in compared(offload=True):
        assert found.replicas > 20


def test_tensor_parallelism() -> None:
    """Sequences are padded, and each rank has a slice of them."""
    for found in compared(tensor=2):
        assert found.replicas > 20
        assert found.mixed == found.unplanned == 0


def test_pipeline_parallelism() -> None:
    """Two stages of two ranks. The figures are those of the layers of the last stage."""
    comparisons = compared(ranks=4, pipeline=2, recompute=True)
    assert [bool(found.metrics) for found in comparisons] == [False, False, True, True]
    for found in comparisons:
        assert found.replicas > 20


def test_bfloat16() -> None:
    for found in compared(tensor=2, dtype="bfloat16"):
        assert found.replicas > 20


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_second_pass_of_r2_is_planned_and_not_the_recording_one(tensor: int) -> None:
    for found in compared(replay="R2", tensor=tensor):
        assert found.planned == (2, 2)
        assert found.replicas > 20
        assert found.mixed == found.unplanned == 0


def test_live() -> None:
    for found in compared(trimtab={"mode": "live"}):
        assert found.metrics["actor/moe/replicas"][0] > 0


@pytest.mark.parametrize("mode", ["shadow", "off"])
def test_modes_that_change_nothing(mode: str) -> None:
    for found in compared(trimtab={"mode": mode}):
        assert set(found.errors.values()) == {0.0}
        assert ("actor/moe/predicted_gain" in found.metrics) == (mode == "shadow")


@pytest.mark.parametrize("mode", ["plan", "live"])
@on_verl_ranks()
def test_a_reference_engine_beside_the_actor_is_not_planned(mode: str) -> None:
    from verl.utils import tensordict_utils

    prepare()
    case = VerlCase({"mode": mode})
    outputs = []
    for is_balanced in (False, True):
        with (
            engine_of(case, is_balanced=is_balanced) as actor,
            engine_of(VerlCase(replay="disabled"), is_balanced=is_balanced, forward_only=True) as reference,
        ):
            plain = batch(case, 0)
            tensordict_utils.assign_non_tensor(plain, enable_routing_replay=False)
            outputs.append(engine_pass(reference, plain, Run(), forward_only=True)["model_output"]["log_probs"])
            assert getattr(reference, "session", None) is None
            # Nor is a pass of the actor that verl does not replay.
            result = Run()
            engine_pass(actor, plain, result, forward_only=True)
            assert result.reports == [None]
    assert torch.equal(outputs[0].values(), outputs[1].values())


@on_verl_ranks()
def test_figures_are_among_what_verl_s_trainer_logs() -> None:
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict
    from verl.workers.engine_workers import TrainingWorker

    prepare()
    case = VerlCase({"slots_per_rank": 6}, exact=True)
    with engine_of(case) as engine:
        result = Run()
        worker = SimpleNamespace(engine=engine, device_name="cpu", flops_counter=None)
        outputs = engine_pass(engine, batch(case, 0), result, forward_only=False)
        # As `TrainingWorker.train_batch` and `train_mini_batch`, then the trainer.
        outputs.pop("model_output")
        output = TrainingWorker._postprocess_output(
            worker, outputs, global_token_num=None, delta_time=1.0, forward_only=False, images_seqlens=None
        )
        metrics = {
            name: list(chain.from_iterable(value)) if isinstance(value, list) else [value]
            for name, value in output["metrics"].items()
        }
        logged = reduce_metrics(rename_dict(metrics, "actor/"))
    (report,) = result.reports
    assert logged["actor/moe/replicas"] == report.replicas > 0
    assert logged["actor/moe/max_vio_before"] == report.max_vio_before
    assert logged["actor/moe/max_vio_after"] == report.max_vio_after
    assert logged["actor/moe/predicted_gain"] == report.predicted_gain
    assert logged["actor/moe/mixed_instances"] == logged["actor/moe/unplanned_micro_steps"] == 0
    assert logged["actor/moe/pool_bytes"] == report.memory.pool_bytes > 0
    lines = [line for line in engine.printed if line.startswith("Trimtab ") and f" in verl {version('verl')}, " in line]
    assert [len(each) for each in of_all_ranks(lines)] == [1, 0]


@on_verl_ranks()
def test_routes_that_one_rank_can_t_read_end_the_pass_on_all_ranks() -> None:
    prepare()
    case = VerlCase()
    with engine_of(case) as engine:
        good, bad = batch(case, 0), batch(case, 0)
        if torch.distributed.get_rank() == 1:
            routes = [each[:-2] for each in bad["routed_experts"].unbind()]
            bad["routed_experts"] = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
        with engine.train_mode():
            with pytest.raises(InputError, match=r"rows for .* input tokens"):
                engine.train_batch(bad, loss)
            engine.train_batch(good, loss)
        assert engine.session.report is not None


@contextmanager
def in_one_process() -> Iterator[None]:
    with mock.patch.dict("os.environ", {"VERL_ENGINE_DEVICE": "cuda"}):
        yield


def test_an_engine_is_refused_before_it_is_made() -> None:
    """Other options are those of `test_verl_flag`."""
    with in_one_process(), pytest.raises(InputError, match="use_fused_kernels=True is not supported"):
        make_engine(VerlCase(), is_balanced=True, use_fused_kernels=True)


def test_verl_s_registry_chooses_the_engine_of_the_actor_alone() -> None:
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron import transformer_impl

    import trimtab.integrations.verl as plugin

    with mock.patch.dict("os.environ", {"VERL_ENGINE_VENDOR": "trimtab"}):
        for device in ("cuda", "npu"):
            with mock.patch.dict("os.environ", {"VERL_ENGINE_DEVICE": device}):
                assert EngineRegistry.get_engine_cls("language_model", "megatron") is plugin.TrimtabMegatronEngine
        with in_one_process():
            critic = EngineRegistry.get_engine_cls("value_model", "megatron")
            assert critic is transformer_impl.MegatronEngineWithValueHead
            assert "Trimtab" not in EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__


def test_what_is_read_of_verl_s_configs_is_there() -> None:
    from verl.workers.config import HFModelConfig, McoreEngineConfig
    from verl.workers.config.engine import EngineRouterReplayConfig, QATEngineConfig
    from verl.workers.config.model import MtpConfig

    read = {
        McoreEngineConfig: {
            "forward_only", "override_mcore_model_config", "router_replay", "qat", "dynamic_context_parallel",
            "use_fused_kernels", "use_megatron_fsdp",
        },
        EngineRouterReplayConfig: {"mode"}, QATEngineConfig: {"enable"}, HFModelConfig: {"lora", "mtp"},
        MtpConfig: {"enable"},
    }  # fmt: skip
    for config, names in read.items():
        assert names <= {field.name for field in fields(config)}, config


def test_the_engine_is_called_as_verl_s() -> None:
    from verl.workers.engine.megatron import transformer_impl

    import trimtab.integrations.verl as plugin

    for name in ("__init__", "_build_optimizer", "forward_backward_batch"):
        plain, replaced = (
            list(inspect.signature(getattr(cls, name)).parameters)
            for cls in (transformer_impl.MegatronEngineWithLMHead, plugin.TrimtabMegatronEngine)
        )
        assert plain == replaced
