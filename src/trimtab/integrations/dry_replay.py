"""`DryReplayPlugin`: balance in frameworks that give recorded routing to Megatron's routers, as ROLL and ms-swift."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import nn

from trimtab.errors import InputError
from trimtab.integrations.framework_options import VARIABLE, raise_first, refused, wrong_mode
from trimtab.integrations.megatron.option_tables import Option, options_of, refusals
from trimtab.integrations.options import MODES, PluginOptions
from trimtab.integrations.plugin_report import first_line, print_on_first_rank, step_figures
from trimtab.integrations.routers import are_replaying, moe_layers, replayed_ids
from trimtab.integrations.schedule import MicroBatchRoutes, ScheduleAdapter

MEGATRON_NAMES = (
    "megatron.core.transformer.moe.moe_utils:topk_routing_with_score_function(router_replay)",
    "megatron.core.transformer.moe.router_replay:RouterReplay.set_target_indices(topk_indices)",
    "megatron.core.transformer.moe.router_replay:RouterReplay.target_topk_idx",
    "megatron.core.transformer.moe.router_replay:RouterReplay.router_replay_action",
    "megatron.core.transformer.moe.router_replay:RouterReplay.clear_global_indices()",
    "megatron.core.transformer.moe.router_replay:RouterReplayAction.REPLAY_FORWARD",
)
"""Names of Megatron, from 0.16 on, that a plugin needs beside those of the framework."""


class DryReplayPlugin(ABC):
    """A framework whose forward step gives recorded ids to the routers' `RouterReplay`.

    Passes of the schedule that begin with the action REPLAY_FORWARD are planned, by the ids that the framework's own
    code gives to the routers. Other passes run as without Trimtab. Experts keep their homes: these frameworks export
    weights by position.

    Attributes:
        package, fits: the framework's package, and its versions for which the plugin was written.
        refused, refused_replay: options of the framework that are refused, and those refused with recorded routing.
        adapter: plans the passes; None before `plan_passes`.
    """

    package: ClassVar[str]
    fits: ClassVar[str]
    refused: ClassVar[tuple[Option, ...]]
    refused_replay: ClassVar[tuple[Option, ...]] = ()

    def __init__(self) -> None:
        text = os.environ.get(VARIABLE, "")
        self.options = PluginOptions.from_text(text, source=VARIABLE, modes=(*MODES, "rehome"))
        self.adapter: ScheduleAdapter | None = None

    @abstractmethod
    def set_targets(self, micro_batch: Any, chunk: nn.Module) -> None:
        """Give a micro-batch's ids to the routers of a chunk, by the framework's own function.

        Tokens whose output nothing uses have -1 in all layers.
        """

    def refuse_options(self, given: Mapping[str, Any], *, replays: bool) -> None:
        """Raise InputError with the first option of the framework that is refused, and the number of others."""
        problem = wrong_mode(self.package, self.options.mode, replays)
        of_mode = () if self.options.mode == "live" else self.refused_replay
        raise_first(self.package, [problem] * bool(problem) + refused((*self.refused, *of_mode), given))

    def refuse_model(self, config: Any) -> None:
        """The same for a model, by its TransformerConfig."""
        if not getattr(config, "num_moe_experts", None):
            raise InputError(f"{self.package} can't be balanced: the model has no experts")
        raise_first(self.package, list(refusals(options_of(config)).values()))

    def print_first_line(self, config: Any, notes: Sequence[str] = ()) -> None:
        """The first line of the log, on rank 0."""
        print_on_first_rank(first_line(self.package, self.options, config, notes))

    def plan_passes(self, owner: Any, name: str, *, is_schedule: bool = False) -> None:
        """Replace a name of the schedule, see `ScheduleAdapter`."""
        self.adapter = ScheduleAdapter(owner, self._ids_of, name, is_schedule=is_schedule)
        self.adapter.install()

    def figures(self) -> dict[str, float]:
        """Figures of the passes since the last call, see `step_figures`; empty if none was balanced."""
        found: dict[str, float] = {}
        for session in self.adapter.sessions if self.adapter else ():
            found |= step_figures(session)
        return found

    def uninstall(self) -> None:
        """Give the schedule and all models back as they were. Call it between steps, on all ranks."""
        if self.adapter is not None:
            self.adapter.uninstall()

    def _ids_of(self, micro_batch: Any, chunks: Sequence[nn.Module]) -> MicroBatchRoutes | None:
        """The routing of a micro-batch; see `ScheduleAdapter`."""
        assert self.adapter is not None
        layers, is_live = moe_layers(chunks), self.options.mode == "live"
        if not layers or not (is_live or are_replaying(layers)):
            return None
        # First, so that what one rank can't read is raised on all of them.
        session = self.adapter.balance(chunks, self.options)
        if is_live:
            return MicroBatchRoutes(())

        def set_targets() -> None:
            for chunk in chunks:
                self.set_targets(micro_batch, chunk)

        ids_NLK = replayed_ids(layers, set_targets)
        assert session.session is not None
        if session.session.auxiliary_loss():
            return MicroBatchRoutes(ids_NLK)
        return MicroBatchRoutes(ids_NLK, np.all(ids_NLK < 0, axis=(1, 2)))


def with_result(plain: Callable[..., Any], use: Callable[[Any], None]) -> Callable[..., Any]:
    """A function that calls another one, and shows its result to `use` before it returns it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        use(result)
        return result

    return call
