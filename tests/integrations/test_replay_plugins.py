"""The plugins of slime and miles on stand-ins of their modules: as the frameworks' own replay; what is refused."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from helpers.examples import examples, nightly_except
from helpers.megatron_runs import LENGTH, VOCABULARY, Layout
from helpers.plugin_runs import assert_close, model_on, plans_at_random
from helpers.rank_pool import on_ranks
from helpers.rank_tests import on_megatron_ranks
from helpers.replay_stand_ins import (
    StandIn,
    arguments,
    queues_of,
    reloadable_groups,
    run_rollout,
    some_routes,
    stand_in,
)
from trimtab.errors import InputError
from trimtab.integrations.replay_plugin import ReplayPlugin

STEPS = 2
EP_2 = Layout(2, 2)
PACKAGES = ("slime", "miles")


class Models:
    """Two equal models with the queues of a framework, all layers recomputed; tokens and routes of a rollout."""

    def __init__(self, framework: StandIn, layout: Layout = EP_2, recipe: str | None = None) -> None:
        self.framework = framework
        recompute = "uniform" if recipe is None else "none"
        self.plain, rng = model_on(layout, double=True, recompute=recompute, recipe=recipe)
        self.other = self.plain.copy()
        micro_batches = 2 * layout.pipeline
        self.tokens = list(torch.from_numpy(rng.integers(0, VOCABULARY, (STEPS, micro_batches, LENGTH))))
        shape, unknown = (LENGTH, len(queues_of(self.plain))), framework.package == "miles"
        self.routes = [some_routes(rng, shape, unknown=unknown) for _ in range(STEPS * micro_batches)]

    @contextmanager
    def installed(self, text: str = "", **more: Any) -> Iterator[ReplayPlugin]:
        """The framework with its plugin, and replicas drawn at random."""

        with mock.patch.dict(os.environ, TRIMTAB_BALANCE=text):
            plugin = import_module(f"trimtab.integrations.{self.framework.package}").install(arguments(**more))
        try:
            with plans_at_random():
                yield plugin
        finally:
            plugin.uninstall()


@contextmanager
def models_of(package: str, layout: Layout = EP_2, recipe: str | None = None) -> Iterator[Models]:
    with stand_in(package) as framework:
        yield Models(framework, layout, recipe)


@pytest.mark.parametrize("package", nightly_except(PACKAGES, "miles"))
@on_megatron_ranks
def test_a_rollout_is_that_of_the_framework_s_own_replay(package: str) -> None:
    """Reference, log-probabilities and two optimizer steps; routes of the rollout, then routes of its own recording."""
    with models_of(package) as models:
        framework, routes = models.framework, models.routes
        expected = [run_rollout(framework, models.plain, models.tokens, each)[0] for each in (routes, None)]
        everything = len(routes)
        assert all(each["consumed"] == [(everything,) * 3] * 2 for each in expected)
        with models.installed() as plugin:
            for recorded, wanted in zip((routes, None), expected, strict=True):
                found, logged = run_rollout(framework, models.other, models.tokens, recorded)
                assert assert_close(found, wanted, 1e-12)["ref"] == 0
                assert all(step["moe/replicas"] > 0 for step in logged)
                assert all(step["moe/unplanned_micro_steps"] == step["moe/mixed_instances"] == 0 for step in logged)
                assert all(step["memory/pool_bytes"] > 0 for step in logged)
            assert len(plugin.sessions) == 1


@pytest.mark.longer
@pytest.mark.parametrize("package", examples(short=("slime",), long=PACKAGES))
def test_chunks_of_an_interleaved_pipeline(package: str) -> None:
    on_ranks(_run_interleaved, (package,), ranks=4, patched="megatron")


def _run_interleaved(package: str) -> None:
    """Each stage has the queues of its own layers."""
    with models_of(package, Layout(4, 2, pipeline=2, interleaved=True)) as models:
        expected = run_rollout(models.framework, models.plain, models.tokens, models.routes)[0]
        with models.installed():
            found, logged = run_rollout(models.framework, models.other, models.tokens, models.routes)
        assert_close(found, expected, 1e-11)
        assert all(step["moe/replicas"] > 0 for step in logged)


@pytest.mark.parametrize("package", nightly_except(PACKAGES, "miles"))
@on_megatron_ranks
def test_shadow_and_off_change_no_bit(package: str) -> None:
    with models_of(package) as models:
        expected = run_rollout(models.framework, models.plain, models.tokens, models.routes)[0]
        before = vars(models.framework.model).copy()
        for mode in ("shadow", "off"):
            with models.installed(f"mode={mode}"):
                replaced = vars(models.framework.model) != before
                found, logged = run_rollout(models.framework, models.other, models.tokens, models.routes)
            assert replaced == (mode == "shadow")
            assert all(("moe/replicas" in step) == (mode == "shadow") for step in logged)
            assert vars(models.framework.model) == before
            if mode == "shadow":
                assert_close(found, expected, 0)


@pytest.mark.parametrize("recipe", [None, "GLM-4.5"])
@pytest.mark.parametrize("package", PACKAGES)
@on_megatron_ranks
def test_live_mode_needs_no_recorded_routing(package: str, recipe: str | None) -> None:
    """Megatron's routers have to ask for it, which those of miles' fork don't. MTP layers stay Megatron's."""
    options: dict[str, Any] = {"enable_mtp_training": True, "mtp_num_layers": 1} if recipe else {}
    with models_of(package, recipe=recipe) as models:
        framework = models.framework
        if package == "miles":
            with pytest.raises(InputError, match=r"mode=live needs routers with router_replay, .* use mode=plan"):
                models.installed("mode=live", use_routing_replay=False).__enter__()
            return
        with mock.patch.dict(os.environ, ENABLE_ROUTING_REPLAY="0"):
            losses = [framework.train_step(models.plain, models.tokens[0])]
            with models.installed("mode=live", use_routing_replay=False, **options):
                models.other.zero()
                result = framework.model.train_one_step(None, 0, 0, models.tokens[0], models.other, None, None, 2, 8)
                losses.append(result[0]["loss"])
        assert result[0]["moe/max_vio_before"] > 0
        wanted, found = (
            {name: parameter.main_grad for name, parameter in model.named_parameters().items()}
            for model in (models.plain, models.other)
        )
        for name, gradient in wanted.items():
            assert torch.allclose(found[name], gradient, rtol=1e-9, atol=1e-12), name
        assert bool(recipe) == any(bool(gradient.any()) for name, gradient in wanted.items() if ".mtp.layers." in name)
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)


@pytest.mark.parametrize("package", nightly_except(PACKAGES, "slime"))
@on_megatron_ranks
def test_critics_run_as_without_the_plugin(package: str) -> None:
    with models_of(package) as models:
        expected = run_rollout(models.framework, models.plain, models.tokens, models.routes)[0]
        with models.installed() as plugin:
            models.other.chunks[0].role = "critic"
            found = run_rollout(models.framework, models.other, models.tokens, models.routes)[0]
            assert plugin.sessions == []
        assert_close(found, expected, 0)


@pytest.mark.parametrize("package", nightly_except(PACKAGES, "slime"))
@on_megatron_ranks
def test_groups_are_destroyed_and_created_again_between_steps(package: str) -> None:
    """As a trainer with --offload-train sleeps, WORLD included."""
    with reloadable_groups() as reload, models_of(package) as models:
        framework = models.framework

        def rollouts(model: Any) -> list[Any]:
            found = [run_rollout(framework, model, models.tokens, models.routes)]
            framework.actor.destroy_process_groups()
            framework.actor.destroy_process_groups()
            reload()
            return [*found, run_rollout(framework, model, models.tokens, models.routes)]

        expected = rollouts(models.plain)
        with models.installed():
            found = rollouts(models.other)
        for (actual, logged), (wanted, _) in zip(found, expected, strict=True):
            assert_close(actual, wanted, 1e-12)
            assert all(step["moe/replicas"] > 0 for step in logged)


class ReadLater:
    """An entry of slime's queues that is read when it is used."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._ids = ids

    def materialize_for_routing_replay(self, stage: str) -> torch.Tensor:
        assert stage == "forward"
        return self._ids


@on_megatron_ranks
def test_entries_that_are_read_late_and_queues_that_do_not_fit() -> None:
    with models_of("slime") as models, models.installed() as plugin:
        framework, model = models.framework, models.other
        framework.set_stage("replay_backward")
        with pytest.raises(InputError, match="routing of micro-batch 0 can't be read: IndexError"):
            framework.train_step(model, models.tokens[0])
        assert plugin.sessions[0].report is None
        for queue, layer in zip(queues_of(model), (0, 1), strict=True):
            ids = [torch.from_numpy(routes[:, layer]) for routes in models.routes]
            queue.top_indices_list = [ReadLater(each) for each in ids]  # type: ignore[misc]
        framework.train_step(model, models.tokens[0])
        report = plugin.sessions[0].report
        assert report is not None
        assert report.replicas > 0
        framework.set_stage("replay_sideways")
        with pytest.raises(InputError, match=r"slime replays in stage 'replay_sideways'; .* fits slime 624b824a8"):
            framework.train_step(model, models.tokens[0])
        framework.set_stage("replay_backward")
        for layer in model.moe_layers():
            del layer.router.routing_replay
        with pytest.raises(InputError, match="MoE layer 2 has no routing_replay; is Megatron patched as slime"):
            framework.train_step(model, models.tokens[0])


@on_megatron_ranks
def test_padding_that_is_recorded_as_zeros_runs() -> None:
    """A token can't use an expert twice, so such a row is unknown, and its router chooses."""
    with models_of("slime") as models:
        for ids in models.routes:
            ids[-1] = 0
        expected, _ = run_rollout(models.framework, models.plain, models.tokens, models.routes)
        with models.installed():
            found, logged = run_rollout(models.framework, models.other, models.tokens, models.routes)
        # Nothing reads the last token of a micro-batch.
        assert_close(found, expected, 1e-12)
        assert all(step["moe/mixed_instances"] > 0 for step in logged)


@pytest.mark.parametrize("package", PACKAGES)
@on_megatron_ranks
def test_refuses_by_name_before_the_first_step(package: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "slime": {"megatron_deepgemm_forward_layers": [0]},
        "miles": {"lora_rank": 8, "indep_dp": True},
    }
    refused: list[tuple[str, str, dict[str, Any]]] = [
        ("mode=live", "mode=live .* with recorded routing use mode=plan", {}),
        ("", "mode=plan needs recorded routing; add --use-rollout-routing-replay", {"use_routing_replay": False}),
        ("mode=shadow", "mode=shadow needs recorded routing", {"use_routing_replay": False}),
        ("slots=1", "TRIMTAB_BALANCE has no option 'slots'", {}),
        ("", "the model has no experts", {"num_experts": None}),
        *[("", f"{name}=.* is not supported", {name: value}) for name, value in options[package].items()],
        ("", "enable_mtp_training=True is not supported", {"enable_mtp_training": True}),
        ("", "mtp_num_layers=1 is not supported: .* or use mode=live", {"mtp_num_layers": 1}),
        ("", "overlap_moe_expert_parallel_comm=True is not", {"overlap_moe_expert_parallel_comm": True}),
        ("", r"moe_router_fusion=True is not .* \(1 more\)", {"moe_router_fusion": True, "fp8": "e4m3"}),
    ]
    with stand_in(package) as framework:
        before = vars(framework.model).copy(), vars(framework.actor).copy(), vars(framework.replay).copy()
        for text, message, more in refused:
            with mock.patch.dict(os.environ, TRIMTAB_BALANCE=text), pytest.raises(InputError, match=message):
                import_module(f"trimtab.integrations.{package}").install(arguments(**more))
        del framework.actor.destroy_process_groups
        fits = r"megatron_utils\.actor has no destroy_process_groups; this version of Trimtab fits"
        with pytest.raises(InputError, match=f"{fits} {package}"):
            import_module(f"trimtab.integrations.{package}").install(arguments())
        before[1].pop("destroy_process_groups")
        assert before == (vars(framework.model), vars(framework.actor), vars(framework.replay))


@on_megatron_ranks
def test_the_first_line_has_versions_mode_and_what_has_never_run() -> None:
    with stand_in("slime"), redirect_stdout(io.StringIO()) as output:
        plugin = import_module("trimtab.integrations.slime").install(
            arguments(offload_train=True, moe_grouped_gemm=True)
        )
        plugin.uninstall()
        with mock.patch.dict(os.environ, TRIMTAB_BALANCE="mode=off"):
            import_module("trimtab.integrations.slime").install(arguments()).uninstall()
    lines = output.getvalue().splitlines()
    if dist.get_rank():
        assert lines == []
        return
    first, off = lines
    for part in (
        r"^Trimtab \S+ in slime .*, megatron-core \d\S+, torch \d\S+: mode=plan slots_per_rank=auto, 8 ",
        "never run on a GPU", "moe_grouped_gemm=True has never run", "offload_train=True has never run",
    ):  # fmt: skip
        assert re.search(part, first), first
    assert "mode=off" in off
