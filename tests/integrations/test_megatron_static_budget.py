"""Plans fit HybridEP's static dispatch buffers: in no micro-step a rank has more rows, so that no row is dropped.

Transformer Engine and HybridEP are replacements, see `helpers.megatron_fakes`. Megatron before 0.20 has no such option;
there it is set as an attribute, and the replacements do what Megatron would do with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from helpers.fake_te import GroupedLinear
from helpers.megatron_fakes import FAKES_LAYOUT, State, pool_with_fakes  # noqa: F401
from helpers.megatron_runs import LENGTH, VOCABULARY, MegatronCase, Model
from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError
from trimtab.integrations.megatron.option_tables import RANK_CAPACITY

OPTIONS = {field.name for field in fields(TransformerConfig)}
HAS_OPTION = {RANK_CAPACITY, "moe_use_grouped_tensor"} <= OPTIONS
pytestmark = pytest.mark.skipif(
    RANK_CAPACITY in OPTIONS and not HAS_OPTION,
    reason="this Megatron has static buffers with fused operations alone, which are refused",
)
# Rows of an expert are padded to a multiple of it, of 256 in Megatron.
MULTIPLE = 4 if HAS_OPTION else 1
CASE = MegatronCase(flex="hybridep", grouped=True, fused=True, double=True, options={"moe_use_grouped_tensor": True})
if not HAS_OPTION:
    CASE = replace(CASE, options={})
STEPS = 20


def model_with(factor: float | None, like: Model | None = None) -> Model:
    """A model with static buffers, and routers that prefer two experts."""
    options = dict(CASE.options) | ({RANK_CAPACITY: factor} if HAS_OPTION else {})
    model = Model(FAKES_LAYOUT, replace(CASE, options=options))
    vars(model.config)[RANK_CAPACITY] = factor
    for layer in model.moe_layers():
        layer.router.weight.data[:2] *= 3
    if like is not None:
        for parameter, own in zip(model.named_parameters().values(), like.named_parameters().values(), strict=True):
            parameter.data.copy_(own.data)
        model.optimizer.reload_model_params()
    return model


@contextmanager
def static_buffers() -> Iterator[None]:
    """Rows are padded to `MULTIPLE`, and products may have more rows than they need in all versions."""
    with (
        mock.patch.object(GroupedLinear, "is_static", True),
        mock.patch.object(token_dispatcher, "get_align_size_for_quantization", return_value=MULTIPLE),
    ):
        yield


def hybrid_buffer() -> Any:
    from megatron.core.transformer.moe import fused_a2a

    return fused_a2a._hybrid_ep_buffer


@pytest.mark.parametrize("limit", ["exact", pytest.param("max_rows_per_rank", marks=pytest.mark.nightly)])
@runs_on_ranks()
def test_no_row_of_twenty_steps_is_dropped(state: State, limit: str) -> None:
    with static_buffers():
        train(limit)


def train(limit: str) -> None:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from trimtab.integrations.megatron import balance

    even, slots = 2 * LENGTH, 6
    most = even if limit == "exact" else even + 4
    # Of 4 home experts and the slots.
    factor = (most + (4 + slots) * (MULTIPLE - 1)) / even
    function = get_forward_backward_func()
    plain = model_with(None)
    balanced = model_with(factor, plain)
    limits: dict[str, Any] = {"exact": True} if limit == "exact" else {limit: most}
    session = balance(balanced.chunks, slots_per_rank=slots, least_gain=-1e9, **limits)
    budget = int(even * factor)
    budget += -budget % MULTIPLE
    rng = np.random.default_rng(torch.distributed.get_rank())
    replicas = 0
    for _ in range(STEPS):
        tokens_MBS = torch.from_numpy(rng.integers(0, VOCABULARY, (3, LENGTH)))
        routing = plain.record(function, tokens_MBS)
        plain.zero()
        balanced.zero()
        expected = plain.run(function, tokens_MBS)
        hybrid_buffer().sizes.clear()
        actual = run_with_reruns(balanced, session.planned(function, routing), tokens_MBS)
        sizes = hybrid_buffer().sizes
        # One dispatch of each layer and micro-batch.
        assert len(sizes) == 3 * len([*balanced.moe_layers()])
        assert {size for size, _ in sizes} == {budget}
        assert max(used for _, used in sizes) <= budget
        replicas += session.report.replicas if session.report else 0
        assert abs(actual - expected) < 1e-10 * abs(expected)
        for name, parameter in plain.named_parameters().items():
            error = (balanced.named_parameters()[name].main_grad - parameter.main_grad).norm()
            assert error <= 1e-10 * max(float(parameter.main_grad.norm()), 1e-6), name
        for model in (plain, balanced):
            model.optimizer.step()
    assert replicas > 0
    assert session.take_metrics().get("moe/unplanned_micro_steps", 0) == 0
    session.remove()


def run_with_reruns(model: Model, function: Any, tokens_MBS: torch.Tensor, *, reruns: bool = False) -> float:
    """One call as in Megatron's training loop, which runs a step again if rows were dropped."""
    if not HAS_OPTION:
        return model.run(function, tokens_MBS)
    from megatron.core.transformer.moe.paged_stash import PagedStashRunner

    runner = PagedStashRunner(model.config, False, model.chunks, model.optimizer, function)
    with mock.patch.object(runner, "prepare_for_rerun", wraps=runner.prepare_for_rerun) as prepare:
        loss = model.run(runner, tokens_MBS)
    assert prepare.called == reruns
    return loss


@runs_on_ranks()
def test_megatron_alone_drops_rows_of_such_steps_and_a_rerun_within_a_plan_is_planned(state: State) -> None:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from trimtab.integrations.megatron import balance

    with static_buffers():
        function = get_forward_backward_func()
        model = model_with(2.0)
        rng = np.random.default_rng(torch.distributed.get_rank())
        tokens_MBS = torch.from_numpy(rng.integers(0, VOCABULARY, (3, LENGTH)))
        if HAS_OPTION:
            run_with_reruns(model_with(1.0), function, tokens_MBS, reruns=True)
        routing = model.record(function, tokens_MBS)
        session = balance(model.chunks, slots_per_rank=6, exact=True)

        def twice(**arguments: Any) -> Any:
            data = [*arguments.pop("data_iterator")]
            for _ in range(2):
                function(data_iterator=iter(data), **arguments)

        model.run(session.planned(twice, routing), tokens_MBS)
        assert session.take_metrics().get("moe/unplanned_micro_steps", 0) == 0
        session.remove()


@runs_on_ranks()
def test_rows_that_were_not_planned_get_a_larger_buffer(state: State) -> None:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from trimtab.integrations.megatron.physical_dispatch import physical_dispatcher

    with static_buffers():
        layer = next(model_with(1.0).moe_layers())
        physical: Any = physical_dispatcher(layer, 2, get_default_pg_collection())
        if HAS_OPTION:
            # Megatron's runner reads the layer's own flag.
            flags = [each._comm_manager.over_budget for each in (physical, layer.token_dispatcher)]
            assert flags[0] is flags[1]
        sizes = []
        for rows, is_live in ((0, False), (1, False), (9, False), (1, True)):
            arriving_RG = np.array([[0, rows, 0, 1, 0, 0], [0, 0, 0, 0, 0, rows]])
            physical.layer_call = SimpleNamespace(layout=SimpleNamespace(arriving_RG=arriving_RG), is_live=is_live)
            routing_map = torch.zeros(5, 12, dtype=torch.bool)
            physical.dispatch_preprocess(torch.zeros(5, 1, 16), routing_map, routing_map.double())
            manager = physical._comm_manager
            counts = manager.tokens_per_expert.tolist()
            assert counts == [-(-count // MULTIPLE) * MULTIPLE for count in arriving_RG.sum(axis=0)]
            sizes.append(manager.num_permuted_tokens)
    assert sizes == ([12, 12, 28, 12] if MULTIPLE == 4 else [10, 10, 19, 3])


@runs_on_ranks()
def test_limits_that_do_not_fit_static_buffers_are_refused(state: State) -> None:
    from trimtab.integrations.megatron import balance

    def refused(message: str, factor: float, **options: Any) -> None:
        with pytest.raises(InputError, match=message):
            balance(model_with(factor).chunks, **options)

    with static_buffers():
        limits = "needs plans that limit the rows of a rank; use mode 'plan' with exact=True or max_rows_per_rank"
        refused(limits, 1.5)
        for mode in ("rehome", "static"):
            refused(limits, 1.5, mode=mode, exact=True)
        refused("mode 'live' needs it switched off" if MULTIPLE > 1 else limits, 1.5, mode="live")
        refused("=0.9 is less than even ranks have; set it to 1 or more", 0.9, exact=True)
        balance(model_with(1.0).chunks, mode="shadow").remove()
        balance(model_with(1.0).chunks, mode="off").remove()

        # Each of 4 home experts and 4 slots may be padded.
        even = 2 * LENGTH
        padded = (even + 8 * (MULTIPLE - 1)) // MULTIPLE * MULTIPLE
        session = balance(model_with(padded / even).chunks, exact=True, slots_per_rank=4)
        session._check_budget([LENGTH])
        session.remove()
        if MULTIPLE > 1:
            session = balance(model_with((padded - MULTIPLE) / even).chunks, exact=True, slots_per_rank=4)
            with pytest.raises(InputError, match=f"exact=True allows {padded}, padded to {MULTIPLE} for each expert"):
                session._check_budget([LENGTH])
            session.remove()

        session = balance(model_with(2.5).chunks, max_rows_per_rank=3 * LENGTH, slots_per_rank=4)
        ids = np.tile(np.arange(2), (LENGTH, len(session._layers), 1))
        session._check_budget([LENGTH])
        message = rf"=2.5 is \d+ rows of a rank in micro-batch 1, and max_rows_per_rank={3 * LENGTH} allows \d+"
        with pytest.raises(InputError, match=message) as error:
            session.plan([ids, ids[: LENGTH // 2]], 2)
        factor = float(str(error.value).rpartition(" or more")[0].rpartition(" ")[2])
        session.remove()
        for enough in (True, False):
            session = balance(
                model_with(factor if enough else factor - 0.02).chunks, max_rows_per_rank=3 * LENGTH, slots_per_rank=4
            )
            if enough:
                session._check_budget([LENGTH, LENGTH // 2])
            else:
                with pytest.raises(InputError, match="in micro-batch 1"):
                    session._check_budget([LENGTH, LENGTH // 2])
            session.session.mode = "static"  # type: ignore[union-attr]
            with pytest.raises(InputError, match="not mode 'static'"):
                session._check_budget([])
            session.remove()
