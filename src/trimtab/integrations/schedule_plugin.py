"""`SchedulePlugin`: balance in a framework that runs Megatron's schedule and replays recorded routing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from trimtab.integrations.framework_options import read_options
from trimtab.integrations.megatron.layer_numbers import moe_layers
from trimtab.integrations.megatron.option_tables import Option
from trimtab.integrations.plugin_report import first_line, print_on_first_rank, step_figures
from trimtab.integrations.schedule import MicroBatchRoutes, ScheduleAdapter

if TYPE_CHECKING:
    from trimtab.integrations.megatron import MegatronSession


class SchedulePlugin(ABC):
    """A framework that runs Megatron's schedule and replays recorded routing.

    Passes of the schedule that replay routing are planned; in mode `live` all are balanced that may be. Other passes
    run as without Trimtab.

    Attributes:
        package, fits: the framework's package, and its versions for which the plugin was written.
        names: names of the framework that the plugin replaces or the training process uses, see `check_names`.
        refused: options of the framework that are refused, beside those of Megatron.
        adapter: plans the passes; None before `plan_passes`.
    """

    package: ClassVar[str]
    fits: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    refused: ClassVar[tuple[Option, ...]] = ()

    def __init__(self) -> None:
        self.options = read_options()
        self.adapter: ScheduleAdapter | None = None

    @abstractmethod
    def is_replayed(self, micro_batch: Any, layers: Sequence[Any]) -> bool:
        """Whether the framework replays routing for a micro-batch in these MoE layers."""

    @abstractmethod
    def recorded(
        self, micro_batch: Any, chunks: Sequence[nn.Module], layers: Sequence[Any], session: MegatronSession
    ) -> MicroBatchRoutes:
        """The routing that the framework replays for a micro-batch in the MoE layers of these chunks."""

    def replays(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the framework may replay routing in a call of the schedule with these arguments."""
        return True

    def print_first_line(self, config: Any, notes: Sequence[str] = ()) -> None:
        """The first line of the log, on rank 0."""
        print_on_first_rank(first_line(self.package, self.options, config, notes))

    def plan_passes(self, owner: Any, name: str = "get_forward_backward_func", *, is_schedule: bool = False) -> None:
        """Replace a name of the schedule, see `ScheduleAdapter`. Models are balanced in their first pass."""
        self.adapter = ScheduleAdapter(owner, self._ids_of, name, is_schedule=is_schedule, replays=self._may_plan)
        self.adapter.install()

    def figures(self) -> dict[str, float]:
        """Figures of the passes since the last call, see `step_figures`; empty if none was balanced."""
        found: dict[str, float] = {}
        for session in self.sessions:
            found |= step_figures(session)
        return found

    def suspend(self) -> None:
        """Give slots and process groups back until the next planned pass. Collective."""
        for session in self.sessions:
            if session.session is not None:
                session.session.suspend()

    def uninstall(self) -> None:
        """Give the schedule and all models back as they were. Call it between steps, on all ranks."""
        if self.adapter is not None:
            self.adapter.uninstall()

    @property
    def sessions(self) -> list[MegatronSession]:
        """The sessions of the models that were balanced."""
        return self.adapter.sessions if self.adapter else []

    def _may_plan(self, arguments: Mapping[str, Any]) -> bool:
        return self.options.mode == "live" or self.replays(arguments)

    def _ids_of(self, micro_batch: Any, chunks: Sequence[nn.Module]) -> MicroBatchRoutes | None:
        """The routing of a micro-batch; see `ScheduleAdapter`."""
        assert self.adapter is not None
        layers, is_live = moe_layers(chunks), self.options.mode == "live"
        if not layers or not (is_live or self.is_replayed(micro_batch, layers)):
            return None
        # First, so that what one rank can't read is raised on all of them.
        session = self.adapter.balance(chunks, self.options)
        return MicroBatchRoutes(()) if is_live else self.recorded(micro_batch, chunks, layers, session)


def with_result(plain: Callable[..., Any], use: Callable[[Any], None]) -> Callable[..., Any]:
    """A function that calls another one, and shows its result to `use` before it returns it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        use(result)
        return result

    return call
