"""Rows that differ from the plan, and tokens that nothing reads: results of one process, or an error on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from helpers.moe_model import TinyMoE
from helpers.planned_steps import SHAPE, Step, make
from helpers.rank_pool import on_ranks
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from trimtab.errors import InputError, RanksDisagreeError
from trimtab.integrations.transformers.distributed_experts import auxiliary_loss
from trimtab.runtime import ExpertLayer, Session
from trimtab.runtime.planning.rank_load import assign_unread
from trimtab.trace import RoutingTrace

MICRO_STEPS, TOLERANCE = 2, 1e-12


def models(**settings: Any) -> tuple[Session, TinyMoE, TinyMoE]:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    session = Session(num_experts=SHAPE.experts, **settings)
    reference, model = TinyMoE(SHAPE, torch.float64), TinyMoE(SHAPE, torch.float64)
    model.load_state_dict(reference.state_dict())
    model.share(session)
    return session, model, reference


def compare_assigned(seeds: range) -> None:
    session, *_ = models()
    for seed in seeds:
        rng, top_k = np.random.default_rng((seed, session.rank)), 1 + seed % 3
        lengths = rng.integers(0, 20, MICRO_STEPS)
        arrays = [
            np.argsort(rng.random((n, SHAPE.layers, SHAPE.experts)) ** (seed % 4 + 1))[..., :top_k] for n in lengths
        ]
        unread_T = rng.random(int(lengths.sum())) < rng.choice([0.1, 0.5, 1])
        trace = RoutingTrace.from_sequences(arrays, num_experts=SHAPE.experts)
        trace.expert_ids[unread_T] = trace.no_route
        known = trace.expert_ids.copy()
        assign_unread(trace, unread_T, session.homes[0].places.experts_RH, session.topology)
        assert np.array_equal(trace.expert_ids[~unread_T], known[~unread_T])
        assert (np.diff(np.sort(trace.expert_ids, axis=2), axis=2) > 0).all()
        assert not trace.num_tokens or trace.expert_ids.max() < SHAPE.experts
        starts = trace.sequence_starts
        for index in range(MICRO_STEPS):
            tokens = slice(starts[index], starts[index + 1])
            before, after, unread_R = (
                of_all_ranks(each) for each in (known[tokens], trace.expert_ids[tokens], int(unread_T[tokens].sum()))
            )
            for layer in range(SHAPE.layers):
                home_E, ranks = session.placement.home[layer], session.num_ranks
                loads = [0] * ranks
                for ids in before:
                    for expert in ids[:, layer][ids[:, layer] < SHAPE.experts].tolist():
                        loads[home_E[expert]] += 1
                room = [SHAPE.experts // ranks * sum(unread_R)] * ranks
                # One row after another, to the rank that has the fewest.
                for _ in range(top_k * sum(unread_R)):
                    place = min((rank for rank in range(ranks) if room[rank]), key=lambda rank: loads[rank])
                    loads[place] += 1
                    room[place] -= 1
                found = np.bincount(
                    home_E[np.concatenate([ids[:, layer].reshape(-1) for ids in after])], minlength=ranks
                )
                assert sorted(found.tolist()) == sorted(loads), (seed, index, layer)
    session.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_of_unread_tokens_even_out_the_ranks(ranks: int) -> None:
    on_ranks(compare_assigned, (range(6),), ranks=ranks)


@runs_on_ranks()
def test_masks_that_do_not_fit_are_refused_on_all_ranks() -> None:
    session, _, _ = models()
    rows, mask = [np.tile(np.arange(2), (5, SHAPE.layers, 1))] * 2, np.zeros(5, bool)
    is_wrong = session.rank == 1
    for wrong, message in (
        ([mask], "unread has 1 masks; it should have 2"),
        ([mask, mask[:4]], r"unread of micro-step 1 is \[4\] of bool; it should be \[5\] of bool"),
        ([mask.astype(int), mask], r"unread of micro-step 0 is \[5\] of int64"),
    ):
        with pytest.raises(InputError, match=message):
            session.plan_micro_steps(rows, unread=wrong if is_wrong else [mask] * 2)
    with pytest.raises(RanksDisagreeError, match="unread is given is False on rank 0 and True on rank 1"):
        session.plan_micro_steps(rows, unread=[mask] * 2 if is_wrong else None)
    if is_wrong:
        session.auxiliary_loss = lambda: "router_aux_loss_coef=0.1"
    with pytest.raises(InputError, match=r"router_aux_loss_coef=0\.1 uses the routes of all tokens"):
        session.plan_micro_steps(rows, unread=[mask] * 2)
    session.plan_micro_steps(rows)


def test_auxiliary_losses_of_transformers_models() -> None:
    assert not auxiliary_loss(SimpleNamespace())
    assert not auxiliary_loss(SimpleNamespace(output_router_logits=False, router_aux_loss_coef=0.1))
    assert not auxiliary_loss(SimpleNamespace(output_router_logits=True, router_aux_loss_coef=0.0))
    assert auxiliary_loss(SimpleNamespace(output_router_logits=True, router_aux_loss_coef=0.1)) == (
        "output_router_logits=True with router_aux_loss_coef=0.1"
    )


def planned_layer() -> tuple[Session, ExpertLayer, torch.Tensor]:
    """A layer with a planned micro-step of 5 tokens, whose recorded experts are 0 and 1, and these ids."""
    session, model, _ = models()
    layer = model.moe_blocks()[0].layer
    assert layer is not None
    session.plan_micro_steps([np.tile(np.arange(2), (5, SHAPE.layers, 1))])
    return session, layer, torch.tensor([[0, 1]] * 5)


@runs_on_ranks()
def test_ids_that_can_not_be_used_raise_on_all_ranks() -> None:
    session, layer, ids = planned_layer()
    wrong: dict[str, torch.Tensor] = {
        r"expert ids \[4, 2\]; the micro-step was planned with \[5, 2\]": ids[:4],
        r"expert ids \[5, 1\]; the micro-step was planned with \[5, 2\]": ids[:, :1],
        "expert id 8; ids should be from 0 to 7": ids + 7,
        "expert id -1; ids should be": ids - 1,
    }
    for message, values in wrong.items():
        given = values if session.rank else ids
        hidden, weights = torch.zeros(len(given), SHAPE.hidden, dtype=torch.float64), torch.ones(given.shape)
        with pytest.raises((InputError, RuntimeError), match=message), session.micro_step(0, may_deviate=True):
            layer(hidden, given, weights.double())
    hidden, weights = torch.zeros(5, SHAPE.hidden, dtype=torch.float64), torch.ones(5, 2, dtype=torch.float64)
    with session.micro_step(0), pytest.raises(RuntimeError, match=r"micro_step\(index, may_deviate=True\)"):
        layer(hidden, layer.route(ids) + 1, weights)


@pytest.mark.parametrize("reentrant", [True, False])
@runs_on_ranks()
def test_recomputed_layers_have_the_ids_of_their_forward(reentrant: bool) -> None:
    session, layer, ids = planned_layer()
    hidden = torch.ones(5, SHAPE.hidden, dtype=torch.float64, requires_grad=True)
    weights, runs = torch.ones(5, 2, dtype=torch.float64), list[int]()
    changes = False

    def run(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        chosen = layer.route(ids)
        # Two tokens leave the plan; on rank 1 another one if the layer runs again.
        chosen = chosen + torch.arange(5)[:, None].ge(3 - (changes and session.rank == 1 and len(runs) == 2))
        return layer(x, chosen, weights)

    for changes in (False, True):
        runs.clear()
        with session.micro_step(0, may_deviate=session.rank == 0):
            loss = checkpoint(run, hidden, use_reentrant=reentrant).sum()
        if changes:
            with pytest.raises(RuntimeError, match="MoE layer 0 was recomputed in backward with other expert ids"):
                loss.backward()
        else:
            loss.backward()
        assert len(runs) == 2
    # Rows of expert 1 that leave the plan, and of expert 0 that are another one of the token's; once for each forward.
    assert session.take_metrics()["moe/deviating_rows"] == 2 * 2


@contextmanager
def warnings_of() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trimtab").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("trimtab").removeHandler(handler)


@pytest.mark.parametrize("mode", ["plan", "shadow"])
@runs_on_ranks()
def test_agreement_of_the_router_with_the_record(mode: Any) -> None:
    session, model, _ = models(mode=mode)
    layer, tokens = model.moe_blocks()[0].layer, 50
    assert layer is not None
    rows = np.tile(np.arange(2), (tokens, SHAPE.layers, 1))
    rows[0] = -1
    unread = np.arange(tokens) >= 9
    session.plan_micro_steps([rows, rows], unread=[unread, unread])
    with warnings_of() as messages:
        # Of 8 tokens that are known and read, 4 have both experts, in another order, 2 have one, 2 none.
        live = torch.tensor([[0, 1]] + [[1, 0]] * 4 + [[5, 1]] * 2 + [[6, 7]] * 2 + [[0, 7]] * 41)
        for index in range(2):
            with torch.inference_mode(), session.micro_step(index):
                layer.route(live)
        assert session.take_metrics()["moe/replay_agreement"] == 10 / 16
        assert not messages
        for _ in range(2):
            with session.micro_step(0):
                layer.route(live.flip(0))
                layer.route(torch.full_like(live, 7))
            assert session.take_metrics()["moe/replay_agreement"] < 0.5
        assert len(messages) == 1
        assert "chooses only" in messages[0]
    assert "moe/replay_agreement" not in session.take_metrics()
    with session.live_micro_step():
        layer.route(live)
    assert "moe/replay_agreement" not in session.take_metrics()


@runs_on_ranks()
def test_recomputed_layers_are_not_compared_again() -> None:
    session, model, _ = make()
    step = Step(1)
    step.apply(session)
    found = []
    for run in ("plain", "checkpoint"):
        model.run_block = run
        step.run(session, model)
        found.append((session.counters.compared, int(session.counters.agreeing)))
        session.take_metrics()
        model.zero_grad()
    assert found[0] == found[1]
