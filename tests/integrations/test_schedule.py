"""`ScheduleAdapter` on Megatron's own schedules: a module that gets its schedule by name, as frameworks have it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.plugin_runs import plans_at_random
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from integrations.test_megatron_modes import MICRO_BATCHES, Pair, State, pair_of, parts_of
from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.integrations.options import PluginOptions
from trimtab.integrations.schedule import ScheduleAdapter

PLAN = PluginOptions()


class Framework(ModuleType):
    """A module of a framework that runs a pass of a model by the name of Megatron's schedule."""

    def __init__(self) -> None:
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        super().__init__("framework.model")
        self.get_forward_backward_func = get_forward_backward_func

    def run(self, **arguments: Any) -> Any:
        return self.get_forward_backward_func()(**arguments)


class Recorded:
    """`ids_of` of one model: ids by the tokens of a micro-batch, and nothing for other models and broken micro-batches.

    Attributes:
        asked: the micro-batches for which it was asked.
    """

    def __init__(self, model: Any, tokens_MBS: torch.Tensor, routing: Sequence[Array]) -> None:
        self.asked: list[Any] = []
        self.missing: set[int] = set()
        self.broken: Exception | None = None
        self._model, self._tokens, self._routing = model, tokens_MBS, routing

    def __call__(self, batch: Any, chunks: Sequence[Any]) -> Any:
        self.asked.append(batch)
        if self.broken is not None:
            raise self.broken
        number = batch if isinstance(batch, int) else self._number(batch)
        return None if chunks[0] not in self._model.chunks or number in self.missing else self._routing[number]

    def _number(self, tokens: torch.Tensor) -> int:
        return next(index for index, each in enumerate(self._tokens) if torch.equal(each, tokens))


@contextmanager
def installed(pair: Pair, options: PluginOptions = PLAN, **more: Any) -> Iterator[tuple[Framework, Any, Recorded]]:
    """The second model in an adapter, with replicas drawn at random."""

    framework, ids_of = Framework(), Recorded(pair.other, pair.tokens_MBS, pair.routing)
    adapter = ScheduleAdapter(framework, ids_of)
    adapter.install()
    adapter.balance(pair.other.chunks, options, **more)
    try:
        with plans_at_random():
            yield framework, adapter, ids_of
    finally:
        adapter.uninstall()


@runs_on_ranks()
def test_passes_are_planned_if_all_their_ids_are_known(state: State) -> None:
    pair = pair_of(state)
    before, plain_name = parts_of(pair), Framework().get_forward_backward_func
    with installed(pair) as (framework, adapter, ids_of):
        (session,) = adapter.sessions
        assert adapter.balance(pair.other.models, PLAN) is session
        assert pair.error(pair.step(pair.other, framework.run)) < 1e-12
        assert session.report.replicas > 0
        assert session.take_metrics()["moe/unplanned_micro_steps"] == 0
        assert len(ids_of.asked) == MICRO_BATCHES
        # As of a reference: Megatron's own run, bit for bit.
        session.report = None
        for ids_of.missing in ({0}, {1}):
            assert pair.is_same(pair.step(pair.other, framework.run))
        assert pair.is_same(pair.step(pair.plain, framework.run))
        assert session.report is None
        ids_of.missing = set()
        assert not all(of_all_ranks(pair.is_same(pair.step(pair.other, framework.run))))
        with pytest.raises(InputError, match=r"installed in framework\.model already"):
            adapter.install()
    assert framework.get_forward_backward_func is plain_name
    assert all(part is kept for part, kept in zip(parts_of(pair), before, strict=True))
    assert pair.is_same(pair.step(pair.other, framework.run))


@runs_on_ranks()
def test_what_one_rank_can_t_read_is_raised_on_all_ranks(state: State) -> None:
    pair = pair_of(state)
    with installed(pair) as (framework, _adapter, ids_of):
        if dist.get_rank():
            ids_of.broken = ValueError("the routes are gone")
        with pytest.raises(InputError, match="routing of micro-batch 0 can't be read: ValueError: the routes are gone"):
            pair.step(pair.other, framework.run)
        ids_of.broken = None

        def ends_early(*, data_iterator: Any, **others: Any) -> Any:
            return framework.run(data_iterator=iter(list(data_iterator)[: 2 - dist.get_rank()]), **others)

        with pytest.raises(InputError, match="the data iterator ended after 1 of 2 micro-batches"):
            pair.step(pair.other, ends_early)
        assert pair.error(pair.step(pair.other, framework.run)) < 1e-12


@runs_on_ranks()
def test_models_without_a_session_are_named(state: State) -> None:
    pair = pair_of(state)
    framework = Framework()
    adapter = ScheduleAdapter(framework, Recorded(pair.plain, pair.tokens_MBS, pair.routing))
    adapter.install()
    with pytest.raises(InputError, match="a model without a session; call balance"):
        pair.step(pair.plain, framework.run)
    adapter.uninstall()
    with pytest.raises(InputError, match=r"framework\.model has no get_forward_backward"):
        ScheduleAdapter(framework, lambda batch, chunks: None, "get_forward_backward").install()


@runs_on_ranks()
def test_only_the_micro_batches_of_a_pass_are_taken(state: State) -> None:
    """An iterator may go on, as that of pre-training."""
    pair = pair_of(state)
    rest: list[Any] = []

    def endless(*, data_iterator: Any, **others: Any) -> Any:
        longer = iter([*data_iterator, "next step"])
        framework.run(data_iterator=longer, **others)
        rest.extend(longer)

    with installed(pair) as (framework, _adapter, _ids_of):
        assert pair.error(pair.step(pair.other, endless)) < 1e-12
        assert rest == ["next step"]
