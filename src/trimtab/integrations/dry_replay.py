"""`DryReplayPlugin`: balance in frameworks that give recorded routing to Megatron's routers: ROLL, NeMo-RL, SkyRL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import nn

from trimtab.errors import InputError
from trimtab.framework_names import check_names
from trimtab.integrations.framework_options import megatron_refusals, raise_first, read_options, refused, wrong_mode
from trimtab.integrations.megatron.layer_numbers import moe_layers
from trimtab.integrations.megatron.option_tables import Option
from trimtab.integrations.options import MODES
from trimtab.integrations.plugin_report import first_line, print_on_first_rank, step_figures
from trimtab.integrations.routers import are_replaying, replayed_ids
from trimtab.integrations.schedule import MicroBatchRoutes, ScheduleAdapter, innermost

if TYPE_CHECKING:
    from trimtab.integrations.megatron import MegatronSession

MEGATRON_NAMES = (
    "megatron.core.transformer.moe.moe_utils:topk_routing_with_score_function(router_replay)",
    "megatron.core.transformer.moe.router_replay:RouterReplay.set_target_indices(topk_indices)",
    "megatron.core.transformer.moe.router_replay:RouterReplay.target_topk_idx",
    "megatron.core.transformer.moe.router_replay:RouterReplay.router_replay_action",
    "megatron.core.transformer.moe.router_replay:RouterReplay.clear_global_indices()",
    "megatron.core.transformer.moe.router_replay:RouterReplayAction.REPLAY_FORWARD",
)
"""Names of Megatron, from 0.16 on, that a plugin needs beside those of the framework."""


UNREAD = -1
"""In all layers, the id of tokens whose output nothing uses. Other negative ids are unknown."""


class DryReplayPlugin:
    """A framework that gives recorded ids to the routers' `RouterReplay`.

    Passes of the schedule that replay routing are planned, by the ids that the framework's own code gives to the
    routers. Other passes run as without Trimtab. Experts keep their homes: these frameworks export weights by position,
    or copy those of other models into the same Parameters.

    Attributes:
        package, fits: the framework's package, and its versions for which the plugin was written.
        names: names of the framework that the training process uses, see `check_names`.
        refused, refused_replay: options of the framework that are refused, and those refused with recorded routing.
        adapter: plans the passes; None before `plan_passes`.
        marks_unread: whether `set_targets` may mark tokens as `UNREAD`; not if the model has a loss or bias over the
            routes of all tokens, which then are as the framework replays them.
    """

    package: ClassVar[str]
    fits: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    refused: ClassVar[tuple[Option, ...]] = ()
    refused_replay: ClassVar[tuple[Option, ...]] = ()

    def __init__(self) -> None:
        self.options = read_options((*MODES, "rehome"))
        self.adapter: ScheduleAdapter | None = None
        self.marks_unread = True
        self._only_known_models = False

    def set_targets(self, micro_batch: Any, chunk: nn.Module) -> None:
        """Give a micro-batch's ids to the routers of a chunk, by the framework's own function; see `UNREAD`."""
        raise NotImplementedError

    def is_replayed(self, micro_batch: Any, layers: Sequence[Any]) -> bool:
        """Whether the framework replays routing for a micro-batch in these MoE layers; by default, whether it has told
        the routers so before the pass."""
        return are_replaying(layers)

    def replays(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the framework may replay routing in a call of the schedule with these arguments."""
        return True

    def check_names(self) -> None:
        """Raise InputError unless the framework and Megatron have the names that the plugin uses."""
        check_names((*self.names, *MEGATRON_NAMES), fits=self.fits)

    def refuse_options(self, given: Mapping[str, Any], *, replays: bool) -> None:
        """Raise InputError with the first option of the framework that is refused, and the number of others."""
        mode = self.options.mode
        problem = wrong_mode(self.package, mode, replays)
        options = self.refused if mode == "live" else (*self.refused, *self.refused_replay)
        raise_first(self.package, [problem] * bool(problem) + refused(options, given, mode))

    def refuse_model(self, config: Any) -> None:
        """The same for a model, by its TransformerConfig."""
        if not getattr(config, "num_moe_experts", None):
            raise InputError(f"{self.package} can't be balanced: the model has no experts")
        raise_first(self.package, megatron_refusals(self.options.mode, vars(config)))

    def print_first_line(self, config: Any, notes: Sequence[str] = ()) -> None:
        """The first line of the log, on rank 0."""
        print_on_first_rank(first_line(self.package, self.options, config, notes))

    def plan_passes(self, owner: Any, name: str = "get_forward_backward_func", *, is_schedule: bool = False) -> None:
        """Replace a name of the schedule, see `ScheduleAdapter`. Models are balanced in their first pass."""
        self.adapter = ScheduleAdapter(owner, self._ids_of, name, is_schedule=is_schedule, replays=self._may_plan)
        self.adapter.install()

    def balance(self, owner: Any, model_chunks: Sequence[nn.Module]) -> None:
        """Print the first line, and plan the passes of this model alone. Call it when it is built and loaded, on all
        ranks.

        Args:
            owner: the framework's module that has `get_forward_backward_func`.

        Raises:
            InputError: if the model is refused; see `megatron.balance`.
        """
        model: Any = innermost(model_chunks[0])
        self.print_first_line(model.config)
        self.plan_passes(owner)
        self._only_known_models = True
        assert self.adapter is not None
        self.adapter.balance(model_chunks, self.options)

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
        if self._only_known_models and self.adapter.session_of(chunks) is None:
            return None
        layers, is_live = moe_layers(chunks), self.options.mode == "live"
        if not layers or not (is_live or self.is_replayed(micro_batch, layers)):
            return None
        # First, so that what one rank can't read is raised on all of them.
        session = self.adapter.balance(chunks, self.options)
        return MicroBatchRoutes(()) if is_live else self.recorded(micro_batch, chunks, layers, session)

    def recorded(
        self, micro_batch: Any, chunks: Sequence[nn.Module], layers: Sequence[Any], session: MegatronSession
    ) -> MicroBatchRoutes:
        """The routing that the framework replays for a micro-batch in the MoE layers of these chunks."""

        def set_targets() -> None:
            for chunk in chunks:
                self.set_targets(micro_batch, chunk)

        assert session.session is not None
        self.marks_unread = not session.session.auxiliary_loss()
        ids_NLK = replayed_ids(layers, set_targets)
        return MicroBatchRoutes(ids_NLK, np.all(ids_NLK == UNREAD, axis=(1, 2)) if self.marks_unread else None)


def with_result(plain: Callable[..., Any], use: Callable[[Any], None]) -> Callable[..., Any]:
    """A function that calls another one, and shows its result to `use` before it returns it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        use(result)
        return result

    return call
