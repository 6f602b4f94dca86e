"""ROLL's plugin on a stand-in of its strategy and workers: as its own replay; what is refused."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from helpers.megatron_runs import LENGTH, Layout
from helpers.plugin_runs import assert_close, gradients, model_on, plans_at_random, use_routers
from helpers.rank_pool import on_ranks
from helpers.rank_tests import on_megatron_ranks
from helpers.roll_stand_in import (
    FLAG,
    DataProto,
    Strategy,
    Worker,
    log_probs,
    random_batch,
    roll,
    some_loss,
    with_causal_mask,
    worker_config,
)
from trimtab.errors import InputError

STEPS, MICRO_BATCHES = 2, 2
EP_2 = Layout(2, 2)


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
            optimizer = self.strategy.optimizer
            with mock.patch.object(optimizer, "step", partial(self._keep, found, step, optimizer.step)):
                self.logged.append(self.strategy.train_step(batch=batch, loss_func=some_loss))
            self.strategy.offload_states()
        self.strategy.load_states()
        found["loss"] = torch.tensor([step.get("actor/pg_loss", [0.0]) for step in self.logged[-STEPS:]])
        return found

    def _keep(self, found: dict[str, Any], step: int, plain: Any) -> Any:
        found |= gradients(step, self.model.named_parameters())
        return plain()


class Runs:
    """Runs of equal models on the same batches, in ROLL as it is and with the plugin.

    Attributes:
        other: the last run with the plugin.
    """

    other: Run

    def __init__(self, layout: Layout = EP_2, **case: Any) -> None:
        options = {"double": True, "recompute": "uniform", "router_replay": True} | case
        self.model, rng = model_on(layout, **options)
        layers = self.model.config.num_layers
        self.batches = [random_batch(rng, MICRO_BATCHES, LENGTH, 8, layers) for _ in range(STEPS)]

    def copy(self) -> Run:
        model = self.model.copy()
        with_causal_mask(model, LENGTH)
        return Run(model)

    def expected(self, **config: Any) -> dict[str, Any]:
        run = self.copy()
        run.make_strategy(worker_config(**config))
        return run.rollout(self.batches)

    @contextmanager
    def balanced(self, text: str = "", name: str = "ActorWorker", **config: Any) -> Iterator[Any]:
        """The worker with the plugin, initialized as ROLL does, and replicas drawn at random."""
        values, self.other = worker_config(**config), self.copy()
        with (
            mock.patch.dict(os.environ, TRIMTAB_BALANCE=text),
            mock.patch.object(Worker, "make_strategy", side_effect=lambda: self.other.make_strategy(values)),
        ):
            worker = getattr(import_module("trimtab.integrations.roll"), name)(values)
            worker.initialize(None)
        try:
            with plans_at_random():
                yield worker
        finally:
            self.other.strategy.load_states()
            for session in sessions(worker):
                session.remove()


def sessions(worker: Any) -> list[Any]:
    plugin = worker.trimtab_plugin
    return [] if plugin.adapter is None else plugin.adapter.sessions


def figures(run: Run) -> list[dict[str, float]]:
    start = "actor_train/"
    return [{name.removeprefix(start): value for name, value in step.items()} for step in run.logged[-STEPS:]]


def compare(layout: Layout = EP_2) -> None:
    with roll():
        runs = Runs(layout)
        expected = runs.expected()
        with runs.balanced():
            found = runs.other.rollout(runs.batches)
        errors = assert_close(found, expected, 1e-11)
        assert all(error == 0 for name, error in errors.items() if name.startswith("0 unrecorded"))
        for step in figures(runs.other):
            assert step["moe/replicas"] > 0
            assert step["moe/unplanned_micro_steps"] == step["moe/mixed_instances"] == 0
            assert step["memory/pool_bytes"] > 0


@pytest.mark.longer
@pytest.mark.parametrize(
    "layout", [EP_2, Layout(2, 2, tensor=2), Layout(4, 2, pipeline=2)], ids=["EP", "TP", "pipeline"]
)
def test_a_rollout_is_that_of_roll_s_own_replay(layout: Layout) -> None:
    """Memory of parameters and gradients changes between the steps, and what was not recorded is not planned."""
    on_ranks(compare, (layout,), ranks=layout.ranks, patched="megatron")


@on_megatron_ranks
def test_passes_that_record_or_replay_nothing_are_not_planned() -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    with roll():
        runs = Runs()
        with runs.balanced() as worker:
            strategy, batch = runs.other.strategy, runs.batches[0]
            strategy.load_states()
            use_routers(runs.other.model)
            for action in (RouterReplayAction.RECORD, None):
                RouterReplay.set_global_router_replay_action(action)
                strategy._run(batch, log_probs, forward_only=True)
                assert sessions(worker) == []
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            strategy._run(batch, log_probs, forward_only=True)
            (session,) = sessions(worker)
            assert session.report.replicas > 0
            session.report = None
            RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
            strategy._run(batch, log_probs, forward_only=True)
            assert session.report is None
            assert all(each.recorded_topk_idx is not None for each in RouterReplay.global_router_replay_instances)


@on_megatron_ranks
def test_shadow_and_off_change_no_bit() -> None:
    with roll():
        runs = Runs()
        expected = runs.expected()
        for mode in ("shadow", "off"):
            with runs.balanced(f"mode={mode}"):
                found = runs.other.rollout(runs.batches)
            assert_close(found, expected, 0)
            assert all(("moe/max_vio_before" in step) == (mode == "shadow") for step in figures(runs.other))


@on_megatron_ranks
def test_live_mode_needs_no_recorded_routing() -> None:
    """Also in the pipeline that trains on preferences, which has none."""
    config = {"router_replay": SimpleNamespace(mode="disable")}
    with roll():
        runs = Runs()
        for batch in runs.batches:
            del batch.batch["routed_experts"]
        expected = runs.expected(**config)
        with runs.balanced("mode=live", "DPOActorWorker", **config):
            found = runs.other.rollout(runs.batches)
        assert_close(found, expected, 1e-11)
        assert all(step["moe/max_vio_before"] > 0 for step in figures(runs.other))


@on_megatron_ranks
def test_a_loss_over_all_routes_keeps_the_padding_s_routes_to_the_router() -> None:
    """Routes without a record are unknown then, and their tokens are not given to other ranks at will."""
    with roll():
        runs = Runs(balanced_routers=True)
        with runs.balanced() as worker:
            found = runs.other.rollout(runs.batches)
            assert sessions(worker)[0].session.auxiliary_loss()
        assert all(step["moe/mixed_instances"] > 0 for step in figures(runs.other))
        assert all(torch.isfinite(value).all() for value in found.values())


@on_megatron_ranks
def test_a_setter_that_reaches_no_router_is_named_on_all_ranks() -> None:
    with roll() as modules:
        runs = Runs()
        with runs.balanced():
            runs.other.strategy.load_states()
            use_routers(runs.other.model)
            if dist.get_rank() == 0:
                modules["roll.third_party.megatron.router_replay_utils"].set_router_replay_data = lambda *_: None
            with pytest.raises(InputError, match="gave no ids to the router of MoE layer 2"):
                runs.other.strategy.train_step(runs.batches[0], some_loss)


@on_megatron_ranks
def test_refuses_by_name_before_the_model_is_built() -> None:
    refused: list[tuple[str, str, dict[str, Any]]] = [
        ("mode=live", "mode=live .* with recorded routing use mode=plan", {}),
        (
            "", "mode=plan needs recorded routing; set actor_train.router_replay.mode=R3",
            {"router_replay": SimpleNamespace(mode="disable")},
        ),
        ("slots=1", "TRIMTAB_BALANCE has no option 'slots'", {}),
        ("", "use_sequence_packing=True is not supported", {"use_sequence_packing": True}),
        (
            "", r"use_dynamic_batching_in_train=True is not supported: .* not their routes; .* \(1 more\)",
            {"use_dynamic_batching_in_train": True, "use_dynamic_batching_in_infer": True},
        ),
        ("", "lora_target=all-linear is not", {"model_args": SimpleNamespace(lora_target="all-linear")}),
        (
            "", "context_parallel_size=2 is not",
            {"strategy_args": SimpleNamespace(
                strategy_name="megatron_train", strategy_config={"context_parallel_size": 2}
            )},
        ),
        (
            "mode=shadow", "strategy_name is fsdp2_train, which has no",
            {"strategy_args": SimpleNamespace(strategy_name="fsdp2_train", strategy_config={})},
        ),
    ]  # fmt: skip
    with roll() as modules:
        worker = import_module("trimtab.integrations.roll").ActorWorker
        for text, message, more in refused:
            with mock.patch.dict(os.environ, TRIMTAB_BALANCE=text), pytest.raises(InputError, match=message):
                worker(worker_config(**more)).initialize(None)
        del modules["roll.third_party.megatron.router_replay_utils"].set_router_replay_data
        with pytest.raises(InputError, match=r"router_replay_utils has no set_router_replay_data; .* fits ROLL 8eb27"):
            worker(worker_config()).initialize(None)


@on_megatron_ranks
def test_workers_of_three_pipelines() -> None:
    """ROLL's cluster calls a method by what `register` sets on it."""
    with roll() as modules:
        runs = Runs()
        plugin = import_module("trimtab.integrations.roll")
        for name, module in plugin.WORKERS.items():
            assert issubclass(getattr(plugin, name), modules[module].ActorWorker)
            assert getattr(plugin, name) is getattr(plugin, name)
            assert getattr(getattr(plugin, name).initialize, FLAG) == {"dispatch_mode": "one to all"}
            assert getattr(plugin, name).__name__ == name
        with pytest.raises(AttributeError, match="CriticWorker"):
            _ = plugin.CriticWorker
        with redirect_stdout(io.StringIO()) as output, runs.balanced("", "AgenticActorWorker"):
            pass
        assert output.getvalue().startswith("" if dist.get_rank() else "Trimtab ")
