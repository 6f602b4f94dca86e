"""`MovableExperts`: moves of a Megatron model's experts with their optimizer's state, and exports of moved ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

from trimtab.errors import InputError
from trimtab.integrations.megatron.balanced_layer import BalancedLayer
from trimtab.integrations.megatron.exporters import follow, unfollow
from trimtab.integrations.megatron.logical_order import (
    ADVICE,
    POSITIONAL,
    NamedTensor,
    PositionalGuard,
    WeightExport,
)
from trimtab.integrations.megatron.optimizer_state import MegatronState, optimizers_in
from trimtab.integrations.megatron.support import warn_of_unknown
from trimtab.planner import Placement
from trimtab.runtime import Session

FATES = {
    "return_home": "bring experts that are away back to their first ranks, on all ranks; fully_reshardable does not",
    "refuse": "raise InputError while experts are away; use fully_reshardable",
}
"""What checkpoints by position do, by `positional`."""

log = logging.getLogger("trimtab")


class MovableExperts:
    """What of a `MegatronSession` moves experts and exports them.

    Args:
        session: None without MoE layers.
        chunks, layers: of this rank.
    """

    def __init__(self, session: Session | None, chunks: Sequence[nn.Module], layers: Sequence[BalancedLayer]) -> None:
        self.session = session
        self._chunks, self._layers = list(chunks), list(layers)
        self._optimizer: Any = None
        self._positional, self._logged = "refuse", set[str]()
        self._guard: PositionalGuard | None = None
        self._export = WeightExport(self._layers, self._chunks)
        for layer in self._layers:
            layer.is_exported = lambda: self._export.is_running
            layer.before_positional = self._before_positional

    def register_optimizer(
        self,
        optimizer: Any,
        *,
        is_loaded: Callable[[], bool] = lambda: True,
        positional: Literal["return_home", "refuse"] = "return_home",
    ) -> None:
        """Let plans move experts to other homes, with the optimizer's state of them. Not a collective.

        Moves are made when a step is planned, if no gradients wait for an optimizer step.

        Args:
            optimizer: Megatron's, of all chunks.
            is_loaded: whether its state is on the device, equal on all ranks; while it is not, plans move nothing.
            positional: what `sharded_state_dict` of model and optimizer do while experts are away, in formats that
                store elements by position, such as Megatron's default, `dp_reshardable`: experts return home, which is
                a collective as `return_home`, or InputError is raised. Megatron's checkpoints call them on all ranks.

        Raises:
            InputError: if experts can't move with its state.
        """
        if positional not in FATES:
            raise InputError(f"positional is {positional!r}; it should be one of {', '.join(FATES)}")
        optimizers = optimizers_in(optimizer)
        if self._optimizer is not None:
            raise InputError("an optimizer is registered already; call balance() again for another one")
        self._optimizer, self._positional = optimizer, positional
        if any(isinstance(one, DistributedOptimizer) for one in optimizers):
            self._warn(f"checkpoints in {POSITIONAL[0]}, Megatron's default format, {FATES[positional]}")
        if self.session is None:
            return
        warn_of_unknown(*(one.config for one in optimizers))
        state = MegatronState(optimizers, self.session.topology, self.session.homes, is_loaded)
        self.session.set_framework_state(state)
        optimizer.step = _followed_by(optimizer.step, state.note_step)
        self._guard = PositionalGuard(optimizer, lambda: self.have_moved, self._before_positional)

    def move(self, placement: Placement) -> None:
        """Move all experts to given homes, with the optimizer's state of them, between steps. Plans include moves.
        Collective over the ranks of the expert-parallel groups; nothing on a pipeline stage without MoE layers.

        Args:
            placement: homes `[L, E]` of this rank's L MoE layers, by rank number of the session.

        Raises:
            InputError: if no optimizer is registered, or ranks would have different numbers of experts.
            RanksDisagreeError: if ranks are given different homes.
            RuntimeError: if gradients wait for an optimizer step.
        """
        self._prepare_moves()
        if self.session is not None:
            self.session.move(placement)

    @property
    def have_moved(self) -> bool:
        """Whether experts of this rank's layers are elsewhere than Megatron has them."""
        return self._export.have_moved

    def logical_names(self, pairs: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yields exported weights with the logical numbers of their experts, for any exporter of Megatron models.

        Exporters number experts by rank and place on it. Put this around what they yield, in every weight sync:
        `session.logical_names(bridge.export_hf_weights(model))`. Collective over the ranks of the pipeline.

        Args:
            pairs: names, Megatron's or Hugging Face's, and tensors. Layers are numbered in the whole model. Experts are
                numbered in all ranks, or one tensor has all of a layer.

        Raises:
            InputError: if the name or the tensor of an expert can't be understood.
            RuntimeError: if experts move before the last pair was read.
        """
        return self._export.begin()(pairs)

    def weight_sync(self) -> AbstractContextManager[Callable[[Iterable[NamedTensor]], Iterator[NamedTensor]]]:
        """`logical_names` for exporters that yield lists, and not as many on every rank, as slime's:
        `with session.weight_sync() as rename:`.

        Collective over the ranks of the pipeline. What it gives is not: call that for each list of one weight sync.

        Raises:
            InputError, RuntimeError: from what it gives, as `logical_names` does.
        """
        return self._export.sync()

    def return_home(self) -> None:
        """Move all experts to the ranks on which Megatron has them; see `move`. Not a collective if none is away."""
        if self.session is not None and self.have_moved:
            self.move(self.session.topology.initial_placement(len(self._layers), self.session.num_experts))

    def _before_positional(self, what: str) -> None:
        """Before something stores or loads experts by position, while they are away: on all ranks, they return or this
        raises InputError."""
        if self._positional != "return_home":
            raise InputError(f"{what} experts by position, and they have moved; {ADVICE}")
        self.return_home()
        self._warn(f"experts have returned to their first ranks, since {what} them by position; this is logged once")

    def _warn(self, text: str) -> None:
        """Log a text once, on rank 0; frameworks show warnings only of other packages' loggers."""
        if text not in self._logged and dist.get_rank() == 0:
            log.warning("%s", text)
        self._logged.add(text)

    def _unregister(self) -> None:
        """Bring experts home, and undo all replacements; see `return_home`."""
        self.return_home()
        unfollow(self._export)
        if self._guard is not None:
            self._guard.remove()
            del self._optimizer.step

    def _prepare_moves(self) -> None:
        """Called before experts may move, or replicas are copied from them."""
        if self._optimizer is not None:
            follow(self._export)
        self._gather_parameters()

    def _gather_parameters(self) -> None:
        """Complete the parameters of experts that a distributed optimizer has updated in parts."""
        for chunk in self._chunks:
            ddp: Any = chunk
            config = getattr(ddp, "ddp_config", None)
            if config is not None and config.use_distributed_optimizer and config.overlap_param_gather:
                for bucket_group in ddp.expert_parallel_bucket_groups:
                    bucket_group.start_param_sync(force_sync=True)


def _followed_by(call: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        then()
        return result

    return both
