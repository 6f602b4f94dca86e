"""`ScheduleAdapter`: a framework's calls of Megatron's schedules, planned without an edit of the framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt
from torch import nn

from trimtab.errors import InputError
from trimtab.integrations.options import PluginOptions

if TYPE_CHECKING:
    from trimtab.integrations.megatron import MegatronSession


class MicroBatchRoutes(NamedTuple):
    """Recorded routing of this rank's n tokens of a micro-batch, on the host.

    Attributes:
        ids: `[n, L, K]`, integers; see `MegatronSession.planned`. Negative where a route is unknown.
        unread: `[n]` bool, tokens whose output nothing uses; see `Session.plan_micro_steps`. Given for all
            micro-batches of all ranks, or for none.
    """

    ids: npt.ArrayLike
    unread: npt.ArrayLike | None = None


IdsOf = Callable[[Any, Sequence[nn.Module]], npt.ArrayLike | MicroBatchRoutes | None]
"""`ids_of(micro_batch, chunks)`: the routing of a micro-batch of the model of these chunks; None if its pass is not to
be planned. `micro_batch` is what the data iterator of the first chunk yields, or the micro-batch's number in its pass
where there is no iterator: on a pipeline stage without data, and in frameworks that have an object of their own.
"""

Schedule = Callable[..., Any]
"""Megatron's forward-backward function; takes keyword arguments only."""


class ScheduleAdapter:
    """Replaces the name by which a framework gets Megatron's schedule, `get_forward_backward_func`.

    A call of the schedule runs in the session of its model, if `ids_of` knows the routing of all of its micro-batches;
    else it runs as without Trimtab: passes of reference and teacher, recordings, models that have no session.
    In mode `live`, `ids_of` says by anything but None that the pass is to be balanced. It makes no collective call of
    its own, so all ranks have to answer alike.

    Args:
        owner: the framework's module that has the name, or another object.
        ids_of: see `IdsOf`. What it raises for a model with a session is raised on all ranks that plan.
        name: the name; calling it gives a schedule.
        is_schedule: the name is that of a schedule itself, as of an attribute in which a framework keeps it.
        replays: whether the framework replays recorded routing in a call of the schedule with these arguments. Others
            are not planned, though their micro-batches may have routing.

    Attributes:
        is_replaying: whether a schedule runs now whose routers replay what a session gives them, and not what the
            framework would: in mode `plan`, not in `shadow`, where nothing changes.
    """

    def __init__(
        self,
        owner: Any,
        ids_of: IdsOf,
        name: str = "get_forward_backward_func",
        *,
        is_schedule: bool = False,
        replays: Callable[[Mapping[str, Any]], bool] = lambda arguments: True,
    ) -> None:
        self.is_replaying = False
        self._owner, self._ids_of, self._name, self._is_schedule = owner, ids_of, name, is_schedule
        self._replays = replays
        self._plain: Callable[..., Any] | None = None
        self._sessions: dict[tuple[int, ...], MegatronSession] = {}

    def install(self) -> None:
        """Replace the name. Not a collective.

        Raises:
            InputError: if the module does not have it, or this adapter is installed already.
        """
        where = getattr(self._owner, "__name__", type(self._owner).__name__)
        if self._plain is not None:
            raise InputError(f"this adapter is installed in {where} already; call uninstall() first")
        if not hasattr(self._owner, self._name):
            raise InputError(f"{where} has no {self._name}; Trimtab does not fit this version")
        self._plain = plain = getattr(self._owner, self._name)
        setattr(self._owner, self._name, self.schedule(plain) if self._is_schedule else self._get_schedule)

    def uninstall(self) -> None:
        """Give the name back, and all models as they were. Call it between steps, on all ranks."""
        if self._plain is not None:
            setattr(self._owner, self._name, self._plain)
            self._plain = None
        while self._sessions:
            self._sessions.popitem()[1].remove()

    def balance(
        self, model_chunks: nn.Module | Sequence[nn.Module], options: PluginOptions, **more: Any
    ) -> MegatronSession:
        """The session of a model, made in the first call: `megatron.balance` with these options and others.

        Call it from `ids_of`, or where the framework has built and loaded the model.
        """
        from trimtab.integrations.megatron import balance

        key = _key(model_chunks)
        if key not in self._sessions:
            self._sessions[key] = balance(
                model_chunks, mode=options.mode, slots_per_rank=options.slots_per_rank, routes_of_stage=True, **more
            )
        return self._sessions[key]

    def session_of(self, model_chunks: nn.Module | Sequence[nn.Module]) -> MegatronSession | None:
        """The session of a model, wrapped in DDP or not; None before `balance`."""
        return self._sessions.get(_key(model_chunks))

    @property
    def sessions(self) -> list[MegatronSession]:
        """The sessions of all models."""
        return list(self._sessions.values())

    def _get_schedule(self, *args: Any, **kwargs: Any) -> Schedule:
        """Replaces `get_forward_backward_func`."""
        assert self._plain is not None
        return self.schedule(self._plain(*args, **kwargs))

    def schedule(self, plain: Schedule) -> Schedule:
        """A schedule whose passes are planned. It replaces Megatron's, or a pass that a framework runs without."""

        def schedule(*, model: Any, num_microbatches: int, data_iterator: Any = None, **others: Any) -> Any:
            named = {"model": model, "num_microbatches": num_microbatches, "data_iterator": data_iterator, **others}
            routes: list[MicroBatchRoutes] | None = None
            problem: InputError | None = None
            if self._replays(named):
                batches, named["data_iterator"] = _listed(data_iterator, num_microbatches)
                routes, problem = self._routes(batches, _as_list(model))
                if routes is not None and len(batches) < num_microbatches:
                    problem = InputError(
                        f"the data iterator ended after {len(batches)} of {num_microbatches} micro-batches"
                    )
            if routes is None and problem is None:
                with self._replaying(False):
                    return plain(**named)
            session = self.session_of(model)
            if session is None:
                raise problem or InputError(
                    "ids_of returned routing of a model without a session; call balance() first"
                )
            run = self._balanced(session, plain, routes or [], problem)
            with self._replaying(session.session is not None and session.session.settings.executes_plans):
                return run(**named)

        return schedule

    def _routes(
        self, batches: Sequence[Any], chunks: Sequence[nn.Module]
    ) -> tuple[list[MicroBatchRoutes] | None, InputError | None]:
        """The routing of all micro-batches, None if one has none; and why it can't be read."""
        routes: list[MicroBatchRoutes] = []
        try:
            for batch in batches:
                found = self._ids_of(batch, chunks)
                if found is None:
                    return None, None
                routes.append(found if isinstance(found, MicroBatchRoutes) else MicroBatchRoutes(found))
        except InputError as error:
            return None, error
        # Other ranks wait for this one in the plan.
        except Exception as error:
            problem = InputError(f"routing of micro-batch {len(routes)} can't be read: {type(error).__name__}: {error}")
            problem.__cause__ = error
            return None, problem
        return routes, None

    def _balanced(
        self, session: MegatronSession, plain: Schedule, routes: Sequence[MicroBatchRoutes], problem: InputError | None
    ) -> Schedule:
        """The schedule in the session's mode."""
        if session.session is not None and session.session.mode == "live":
            if problem is not None:
                raise problem
            return session.live(plain)
        unread = [each.unread for each in routes if each.unread is not None]
        return session.planned(plain, [each.ids for each in routes], unread=unread or None, problem=problem)

    @contextmanager
    def _replaying(self, is_replaying: bool) -> Iterator[None]:
        """Sets `is_replaying` for a schedule, which may run within that of another model."""
        before, self.is_replaying = self.is_replaying, is_replaying
        try:
            yield
        finally:
            self.is_replaying = before


def _as_list(model_chunks: Any) -> list[Any]:
    return list(model_chunks) if isinstance(model_chunks, list | tuple) else [model_chunks]


def innermost(chunk: nn.Module) -> nn.Module:
    """The module in DDP and other wrappers, which stays the same when a chunk is wrapped."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def _key(model_chunks: Any) -> tuple[int, ...]:
    return tuple(id(innermost(chunk)) for chunk in _as_list(model_chunks))


def _listed(data_iterator: Any, count: int) -> tuple[list[Any], Any]:
    """The micro-batches of a pass, and iterators that yield them again, as many as were given."""
    if not isinstance(data_iterator, list):
        batches, again = _listed([data_iterator], count)
        return batches, again[0]
    lists = [_micro_batches(iterator, count) for iterator in data_iterator]
    pairs = zip(lists, data_iterator, strict=True)
    again = [iterator if batches is None else iter(batches) for batches, iterator in pairs]
    first = next((batches for batches in lists if batches is not None), None)
    return list(range(count)) if first is None else first, again


def _micro_batches(iterator: Any, count: int) -> list[Any] | None:
    """The next micro-batches of an iterator; None if it is not Python's."""
    if not hasattr(iterator, "__next__"):
        return None
    # Megatron's RerunDataIterator has no `__iter__`.
    end = object()
    batches = (next(iterator, end) for _ in range(count))
    return [batch for batch in batches if batch is not end]
