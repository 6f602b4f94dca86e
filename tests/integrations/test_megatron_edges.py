"""Megatron models at the edges: routers that do not ask for their plan, models of which little is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.rank_tests import runs_on_ranks
from integrations.test_megatron_modes import Pair, State, pair_of


@pytest.mark.parametrize("live", [False, True])
@runs_on_ranks()
def test_a_router_that_does_not_ask_for_its_plan_is_named(state: State, live: bool) -> None:
    """Frameworks wrap Megatron's top-k; the layer would run as without a session, and be reported as balanced."""
    from megatron.core.transformer.moe import router

    pair = pair_of(state)
    own = router.topk_routing_with_score_function

    def other_topk(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs | {"router_replay": None})

    with (
        pair.balanced(**({"mode": "live", "policy": "quota"} if live else {})) as session,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(router, "topk_routing_with_score_function", other_topk)
        function = session.live(pair.function) if live else session.planned(pair.function, pair.routing)
        with pytest.raises(RuntimeError, match=r"MoE layer 0: .* in other_topk of .*test_megatron_edges\.py:\d+"):
            pair.step(pair.other, function)
        patch.undo()
        function = session.live(pair.function) if live else session.planned(pair.function, pair.routing)
        assert pair.error(pair.step(pair.other, function)) < 1e-12


@pytest.mark.parametrize("trained", ["router", "attention", "experts"])
@runs_on_ranks()
def test_parts_may_be_frozen(state: State, trained: str) -> None:
    """As with adapters on attention; without trained attention the input of the first layer needs no gradient."""
    pair = Pair()
    for model in (pair.plain, pair.other):
        for name, parameter in model.named_parameters().items():
            parameter.requires_grad_(trained in name)
    pair.expected = pair.step(pair.plain, pair.function)
    with pair.balanced() as session:
        found = pair.step(pair.other, session.planned(pair.function, pair.routing))
        assert session.report.replicas > 0
        assert pair.error(found) < 1e-12
    assert any(torch.count_nonzero(gradient) for gradient in found[1].values())
