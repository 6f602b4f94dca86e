"""`DryReplayPlugin`: balance in frameworks that give recorded routing to Megatron's routers: ROLL, NeMo-RL, SkyRL."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import nn

from trimtab.errors import InputError
from trimtab.framework_names import check_names
from trimtab.integrations.framework_options import megatron_refusals, raise_first, refused, wrong_mode
from trimtab.integrations.megatron.option_tables import Option
from trimtab.integrations.routers import are_replaying, replayed_ids
from trimtab.integrations.schedule import MicroBatchRoutes, innermost
from trimtab.integrations.schedule_plugin import SchedulePlugin

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


class DryReplayPlugin(SchedulePlugin):
    """A framework that gives recorded ids to the routers' `RouterReplay`.

    Passes are planned by the ids that the framework's own code gives to the routers.

    Attributes:
        refused_replay: options of the framework that are refused with recorded routing, beside `refused`.
        marks_unread: whether `set_targets` may mark tokens as `UNREAD`; not if the model has a loss or bias over the
            routes of all tokens, which then are as the framework replays them.
    """

    refused_replay: ClassVar[tuple[Option, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.marks_unread = True
        self._only_known_models = False

    @abstractmethod
    def set_targets(self, micro_batch: Any, chunk: nn.Module) -> None:
        """Give a micro-batch's ids to the routers of a chunk, by the framework's own function; see `UNREAD`."""

    def is_replayed(self, micro_batch: Any, layers: Sequence[Any]) -> bool:
        """By default, whether the framework has told the routers so before the pass."""
        return are_replaying(layers)

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

    def recorded(
        self, micro_batch: Any, chunks: Sequence[nn.Module], layers: Sequence[Any], session: MegatronSession
    ) -> MicroBatchRoutes:
        def set_targets() -> None:
            for chunk in chunks:
                self.set_targets(micro_batch, chunk)

        assert session.session is not None
        self.marks_unread = not session.session.auxiliary_loss()
        ids_NLK = replayed_ids(layers, set_targets)
        return MicroBatchRoutes(ids_NLK, np.all(ids_NLK == UNREAD, axis=(1, 2)) if self.marks_unread else None)

    def _ids_of(self, micro_batch: Any, chunks: Sequence[nn.Module]) -> MicroBatchRoutes | None:
        assert self.adapter is not None
        if self._only_known_models and self.adapter.session_of(chunks) is None:
            return None
        return super()._ids_of(micro_batch, chunks)
