"""A balanced Megatron model in other modes, with wrong input, after errors, and given back; on two ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.plugin_runs import eager_plans
from helpers.random_choices import quotas_of_few
from helpers.random_plans import random_group_plans
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from trimtab.array_type import Array
from trimtab.cluster import load_cluster
from trimtab.errors import InputError
from trimtab.planner import PlannedStep
from trimtab.rank_variables import BALANCE
from trimtab.runtime.live import balancer
from trimtab.runtime.session_settings import Mode
from trimtab.trace import RoutingTrace

MICRO_BATCHES = 2
State = dict[str, Any]
Results = tuple[float, dict[str, torch.Tensor]]
"""Loss and `main_grad`s of a step."""


class Pair:
    """Two equal models with experts on two ranks, tokens, and the routing that the models choose for them."""

    def __init__(self) -> None:
        from helpers.megatron_runs import LENGTH, VOCABULARY, Layout, MegatronCase, Model, use_layout

        use_layout(Layout(2, 2))
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        self.function = get_forward_backward_func()
        case = MegatronCase(double=True, router_replay=True)
        self.plain = Model(Layout(2, 2), case)
        self.other = self.plain.copy()
        rng = np.random.default_rng(dist.get_rank())
        self.tokens_MBS = torch.from_numpy(rng.integers(0, VOCABULARY, (MICRO_BATCHES, LENGTH)))
        self.routing = self.plain.record(self.function, self.tokens_MBS)
        self.expected = self.step(self.plain, self.function)

    def step(self, model: Any, function: Callable[..., Any]) -> Results:
        """Loss and `main_grad`s of a step."""
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        loss = model.run(function, self.tokens_MBS)
        return loss, {name: parameter.main_grad.clone() for name, parameter in model.named_parameters().items()}

    def is_same(self, found: Results) -> bool:
        """Whether a step is bitwise equal to Megatron's own."""
        grads = zip(found[1].values(), self.expected[1].values(), strict=True)
        return found[0] == self.expected[0] and all(torch.equal(*pair) for pair in grads)

    def error(self, found: Results, wanted: Results | None = None) -> float:
        """The largest relative difference of a step from another one, by default Megatron's own."""
        wanted = wanted or self.expected
        grads = zip(found[1].values(), wanted[1].values(), strict=True)
        errors = [float((actual - expected).norm() / expected.norm().clamp(min=1e-6)) for actual, expected in grads]
        return max([*errors, abs(found[0] / wanted[0] - 1)])

    @contextmanager
    def balanced(self, **options: Any) -> Iterator[Any]:
        """The second model in a session that makes random plans."""
        from trimtab.integrations.megatron import balance
        from trimtab.runtime import step_planner

        # As users run it; others verify.
        session = balance(self.other.chunks, **{"verify_weights": False} | options)
        assert session.session is not None
        topology, rng = session.session.topology, np.random.default_rng(0)

        def plans(loads: Any, schedule: Any, placement: Any, *_: Any, **__: Any) -> PlannedStep:
            return random_group_plans(rng, loads, schedule, placement, topology.ranks_per_node)

        try:
            with mock.patch.object(step_planner, "plan_schedule", plans):
                yield session
        finally:
            session.remove()


def pair_of(state: State) -> Pair:
    if "pair" not in state:
        state["pair"] = Pair()
    return state["pair"]


def parts_of(pair: Pair) -> list[Any]:
    """What `balance` replaces in a model."""
    parts: list[Any] = []
    for layer in pair.other.moe_layers():
        parts += [layer.router.router_replay, layer.token_dispatcher, "forward" in vars(layer.experts)]
    return parts


@runs_on_ranks()
def test_shadow_and_off_change_no_number(state: State) -> None:
    pair = pair_of(state)
    # Megatron's own run does not use it.
    other_routing = [(ids + 1) % 8 for ids in pair.routing]
    for mode in ("shadow", "off"):
        with pair.balanced(mode=mode) as session:
            planned = session.planned(pair.function, other_routing)
            assert pair.is_same(pair.step(pair.other, planned)), mode
            assert (session.report is not None and session.report.replicas > 0) == (mode == "shadow")
    with pair.balanced() as session:
        found = pair.step(pair.other, session.planned(pair.function, pair.routing))
        assert session.report.replicas > 0
        # Sums in another order: the comparison above would notice a plan.
        assert not all(of_all_ranks(pair.is_same(found)))
        assert pair.error(found) < 1e-12
        session.session.mode = "shadow"
        assert pair.is_same(pair.step(pair.other, session.planned(pair.function, other_routing)))


@pytest.mark.parametrize("options", [{}, {"mode": "live", "policy": "quota"}, {"exact": True}])
@runs_on_ranks()
def test_a_variable_switches_balance_off(state: State, options: dict[str, Any]) -> None:
    pair = pair_of(state)
    with mock.patch.dict(os.environ, {BALANCE: "slots_per_rank=3 mode=off"}), pair.balanced(**options) as session:
        function = session.live if "mode" in options else partial(session.planned, routing=pair.routing)
        assert pair.is_same(pair.step(pair.other, function(pair.function)))
        assert session.session.mode == "off"
    with mock.patch.dict(os.environ, {BALANCE: "mode=shadow"}), pair.balanced() as session:
        assert session.session.mode == "plan"


@runs_on_ranks()
def test_live_micro_steps_are_megatron_s_own_with_replicas(state: State) -> None:
    from trimtab.integrations.megatron import balance

    pair = pair_of(state)
    before = parts_of(pair)
    with pytest.raises(InputError, match=r"policy 'feplb' .*; use 'quota' or 'off'"):
        balance(pair.other.chunks, mode="live", policy="feplb")
    assert all(part is kept for part, kept in zip(parts_of(pair), before, strict=True))
    with mock.patch.object(balancer, "choose_quotas", quotas_of_few), pair.balanced(policy="quota") as session:
        live = session.live(pair.function)
        # Only mode live balances.
        for mode in ("plan", "off"):
            session.session.mode = mode
            assert pair.is_same(pair.step(pair.other, live)), mode
        session.session.mode = "live"
        with pytest.raises(InputError, match="nothing is planned in mode 'live'; call live\\(\\)"):
            pair.step(pair.other, session.planned(pair.function, pair.routing))
        found = pair.step(pair.other, live)
        metrics = session.take_metrics()
        assert metrics["live/replicas"] > 0
        assert metrics["live/max_vio_after"] < metrics["live/max_vio_before"]
        assert metrics["transfer/gradient_bytes"] > 0
        assert pair.error(found) < 1e-12
        # A plan in between, with replicas of its own.
        session.session.mode = "plan"
        assert pair.error(pair.step(pair.other, session.planned(pair.function, pair.routing))) < 1e-12
        assert session.report.replicas > 0
        session.session.mode = "live"
        assert pair.error(pair.step(pair.other, live)) < 1e-12
    with pytest.raises(InputError, match="was removed from its model"):
        pair.step(pair.other, live)


@runs_on_ranks()
def test_planning_beside_rollout_and_step(state: State) -> None:
    """Homes and strategy before the step, replicas while it runs, by Trimtab's planner."""
    from trimtab.integrations.megatron import balance

    pair = pair_of(state)
    hashes = 1 + MICRO_BATCHES * dist.get_rank() + np.arange(MICRO_BATCHES)
    trace = RoutingTrace.from_sequences(pair.routing, num_experts=8, sequence_hashes=hashes)
    with eager_plans():
        session = balance(pair.other.chunks, rates=load_cluster("h100x8", ranks=2))
        session.plan_ahead(trace, token_budget=64)
        found = pair.step(pair.other, session.planned(pair.function, pair.routing))
    report, metrics = session.report, session.take_metrics()
    assert report is not None
    assert report.is_sliced
    assert report.known_ahead == 1.0
    assert metrics["moe/planned_replicas"] > 0
    assert metrics["transfer/peer_bytes"] + metrics["transfer/host_bytes"] > 0
    assert metrics["moe/late_micro_steps"] == 0
    assert pair.error(found) < 1e-12
    with pytest.raises(InputError, match="needs sequence_hashes"):
        session.plan_ahead(RoutingTrace.from_sequences(pair.routing, num_experts=8), token_budget=64)
    session.remove()


@runs_on_ranks()
def test_remove_gives_the_model_back(state: State) -> None:
    from trimtab.integrations.megatron import balance

    pair = pair_of(state)
    before = parts_of(pair)
    with pair.balanced() as session:
        assert pair.error(pair.step(pair.other, session.planned(pair.function, pair.routing))) < 1e-12
        assert not any(part is kept for part, kept in zip(parts_of(pair)[:2], before, strict=False))
        with pytest.raises(InputError, match="balanced already; call remove"):
            balance(pair.other.chunks)
        planned = session.planned(pair.function, pair.routing)
    assert all(part is kept for part, kept in zip(parts_of(pair), before, strict=True))
    assert pair.is_same(pair.step(pair.other, pair.function))
    session.remove()
    with pytest.raises(InputError, match="was removed from its model"):
        pair.step(pair.other, planned)


@pytest.mark.parametrize("mode", ["plan", "live"])
@runs_on_ranks()
def test_writes_that_do_not_show_are_followed(state: State, mode: Mode) -> None:
    """As Megatron's optimizers and loading of weights write, through `.data`."""
    pair = pair_of(state)
    nodes = [0, 1] if mode == "plan" else [0, 0]
    with (
        mock.patch.object(balancer, "choose_quotas", quotas_of_few),
        pair.balanced(mode=mode, policy="quota", nodes=nodes) as session,
    ):
        live = session.live(pair.function)
        pair.step(pair.other, session.planned(pair.function, pair.routing) if mode == "plan" else live)
        named = [*pair.plain.named_parameters().items(), *pair.other.named_parameters().items()]
        experts = [parameter for name, parameter in named if "local_experts" in name]
        for parameter in experts:
            parameter.data.mul_(2)
        routing = pair.plain.record(pair.function, pair.tokens_MBS)
        expected = pair.step(pair.plain, pair.function)
        found = pair.step(pair.other, session.planned(pair.function, routing) if mode == "plan" else live)
        for parameter in experts:
            parameter.data.div_(2)
        assert pair.error(found, expected) < 1e-12


@runs_on_ranks()
def test_replicas_come_again_for_a_late_backward(state: State) -> None:
    """Four calls with replicas share two places."""
    from megatron.core.distributed import finalize_model_grads

    def backwards_last(*, forward_step_func: Any, data_iterator: Any, model: Any, **_options: Any) -> None:
        losses = []
        for _ in range(MICRO_BATCHES):
            output, loss_of = forward_step_func(data_iterator, model)
            losses.append(loss_of(output)[0] / MICRO_BATCHES)
        for loss in losses:
            loss.backward()
        finalize_model_grads([model])

    pair = pair_of(state)
    with pair.balanced(ring_layers=2) as session:
        found = pair.step(pair.other, session.planned(backwards_last, pair.routing))
        assert session.report.replicas > 0
    assert pair.error(found, pair.step(pair.plain, backwards_last)) < 1e-12


def wrong_routings(routing: list[Array]) -> dict[str, list[Array]]:
    """Routing that does not fit, by a part of the message."""
    first, *others = routing
    return {
        "recorded for 1 micro-batches, and the step has 2": routing[:1],
        "recorded for 3 micro-batches, and the step has 2": [*routing, first],
        "not \\[tokens, layers, top_k\\]": [first[:, 0], *others],
        "has 1 layers; it should have the 2 MoE layers": [first[:, :1], *others],
        "should be integers": [first.astype(np.float32), *others],
        "as many layers and experts a token as micro-step 0": [first[:, :, :1], *others],
        "has expert id 8": [np.where(first == 7, 8, first), *others],
    }


@runs_on_ranks()
def test_wrong_routing_is_refused_on_all_ranks(state: State) -> None:
    pair = pair_of(state)
    with pair.balanced() as session:
        for message, wrong in wrong_routings(pair.routing).items():
            for wrong_ranks in ((0, 1), (1,)):
                routing = wrong if dist.get_rank() in wrong_ranks else pair.routing
                with pytest.raises(InputError, match=message):
                    pair.step(pair.other, session.planned(pair.function, routing))
        assert pair.error(pair.step(pair.other, session.planned(pair.function, pair.routing))) < 1e-12


@runs_on_ranks()
def test_unknown_routes_are_the_routers_choice(state: State) -> None:
    pair = pair_of(state)
    routing = [ids.copy() for ids in pair.routing]
    routing[0][::3, 0] = -1
    routing[1][5:, 1] = -1
    with pair.balanced() as session:
        planned = session.planned(pair.function, routing)
        assert pair.error(pair.step(pair.other, planned)) < 1e-12
        metrics = session.take_metrics()
        assert (metrics["moe/mixed_instances"], metrics["moe/unplanned_micro_steps"]) == (2, 0)


@pytest.mark.parametrize("behind_the_model", [False, True])
@runs_on_ranks()
def test_an_exception_in_the_users_forward_leaves_the_next_step_clean(state: State, behind_the_model: bool) -> None:
    pair = pair_of(state)
    with pair.balanced() as session:
        planned = session.planned(pair.function, pair.routing)
        calls = 0

        def failing(*, forward_step_func: Callable[..., Any], **others: Any) -> Any:
            def forward_step(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                output = forward_step_func(*args) if calls == 1 or behind_the_model else None
                if calls == 2:
                    raise ValueError("a sample is broken")
                return output

            return planned(forward_step_func=forward_step, **others)

        with pytest.raises(ValueError, match="a sample is broken"):
            pair.step(pair.other, failing)
        assert calls == 2
        for _ in range(2):
            assert pair.error(pair.step(pair.other, planned)) < 1e-12
        assert session.take_metrics()["moe/unplanned_micro_steps"] == 0


def deviating(seed: int) -> Callable[..., Any]:
    """A hook of a router, by which some tokens get other experts, with the same weights."""

    def replace_experts(_router: Any, _args: Any, output: Any) -> Any:
        probs, routing_map = output
        rng = np.random.default_rng((seed, dist.get_rank()))
        order = torch.from_numpy(np.where(rng.random((len(probs), 1)) < 0.3, rng.permutation(8), np.arange(8)))
        return probs.gather(1, order), routing_map.gather(1, order)

    return replace_experts


@runs_on_ranks()
def test_routers_may_choose_other_experts_than_the_plan(state: State) -> None:
    pair = pair_of(state)
    with pair.balanced() as session, ExitStack() as hooks:
        # Routers of later layers would choose other experts than the recorded ones.
        for model in (pair.plain, pair.other):
            router = list(model.moe_layers())[-1].router
            hooks.callback(router.register_forward_hook(deviating(3)).remove)
        expected = pair.step(pair.plain, pair.function)
        for announces in ((True, True), (False, True)):
            planned = session.planned(pair.function, pair.routing, may_deviate=announces[dist.get_rank()])
            assert pair.error(pair.step(pair.other, planned), expected) < 1e-12
            metrics = session.take_metrics()
            assert metrics["moe/deviating_rows"] > 0
            # Of the first micro-batch: the routers' own choice, before the hook.
            assert metrics["moe/replay_agreement"] == 1.0

        def drop(_router: Any, _args: Any, output: Any) -> Any:
            return output[0], output[1] & (torch.arange(len(output[1]))[:, None] > 0)

        if dist.get_rank():
            hooks.callback(router.register_forward_hook(drop).remove)
        planned = session.planned(pair.function, pair.routing, may_deviate=True)
        with pytest.raises(RuntimeError, match="a router gave tokens 0 to 2 experts; with may_deviate=True"):
            pair.step(pair.other, planned)


@runs_on_ranks()
def test_unread_tokens_have_planned_experts_without_auxiliary_losses(state: State) -> None:
    pair = pair_of(state)
    routing, unread = [ids.copy() for ids in pair.routing], np.arange(len(pair.routing[0])) == len(pair.routing[0]) - 1
    for ids in routing:
        ids[unread] = -1
    with pair.balanced() as session:
        planned = session.planned(pair.function, routing, unread=[unread] * MICRO_BATCHES)
        pair.step(pair.other, planned)
        assert session.take_metrics()["moe/mixed_instances"] == 0
        options: list[dict[str, Any]] = [
            {"moe_z_loss_coeff": 0.1}, {"moe_router_enable_expert_bias": True},
            {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss"},
            {"moe_aux_loss_coeff": [0.0, 0.1], "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
        ]  # fmt: skip
        for values in options:
            with (
                mock.patch.multiple(pair.other.config, **values),
                pytest.raises(InputError, match=f"{next(iter(values))}=.* uses the routes of all tokens"),
            ):
                session.plan(routing, MICRO_BATCHES, unread=[unread] * MICRO_BATCHES)
        session.plan(routing, MICRO_BATCHES)
        assert session.report.mixed_instances
