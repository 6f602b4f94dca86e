"""`ReplayPlugin`: balance in frameworks that keep recorded routing in queues of the routers, as slime and miles."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from trimtab.errors import InputError
from trimtab.framework_names import check_names
from trimtab.integrations.framework_options import megatron_refusals, raise_first, refused, wrong_mode
from trimtab.integrations.routers import asks_router_replay
from trimtab.integrations.schedule import MicroBatchRoutes
from trimtab.integrations.schedule_plugin import SchedulePlugin, with_result

if TYPE_CHECKING:
    from trimtab.integrations.megatron import MegatronSession

ComputeTopk = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_UNPLANNED = (None, "fallthrough", "record")
_PLANNED = ("replay_forward", "replay_backward")


class ReplayPlugin(SchedulePlugin):
    """A framework whose routers have queues of recorded ids: `router.routing_replay.top_indices_list`, an entry
    `[n, K]` for every micro-batch of the rollout, `forward_index` for the next forward, and `backward_index` for the
    next recomputation in a backward.

    Passes whose stage is `replay_forward` or `replay_backward` are planned. In them routers ask Trimtab, and the
    indices go on as in the framework.

    Args:
        args: the framework's arguments.

    Attributes:
        model, actor: modules with the schedule's name and `train_one_step`, and with `destroy_process_groups`.
        topk: the function that returns a router's top-k, as in `names`.
    """

    model: ClassVar[str]
    actor: ClassVar[str]
    topk: ClassVar[str]

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.args = args
        self._replaced: list[tuple[Any, str, Any]] = []
        self._routers: dict[int, Any] = {}
        self._asks_router_replay = False

    @abstractmethod
    def stage(self) -> str | None:
        """What routers do in this pass; None if replay is off in this process."""

    @abstractmethod
    def current(self) -> Any:
        """The queue of the router that runs."""

    @abstractmethod
    def routes(self, ids: np.ndarray, layer: Any) -> MicroBatchRoutes:
        """The routing of a micro-batch from what its queues have.

        Args:
            ids: `[n, L, K]` of this rank's tokens and layers.
            layer: one of the MoE layers.
        """

    def install(self) -> None:
        """Check options and names, replace names, and print the first line. Not a collective.

        The framework calls it in every training process, before the model is built.

        Raises:
            InputError: if the framework does not have the names, or an option is refused.
        """
        if self.options.mode != "off":
            self._asks_router_replay = asks_router_replay()
            self._refuse()
            check_names(self.names, fits=self.fits)
            model, actor = import_module(self.model), import_module(self.actor)
            self.plan_passes(model)
            self._replace(model, "train_one_step", lambda plain: with_result(plain, self._add_figures))
            self._replace(actor, "destroy_process_groups", self._suspending)
            module, _, path = self.topk.partition(":")
            *classes, name = path.split(".")
            self._replace(reduce(getattr, classes, import_module(module)), name, self.replaced_topk)
        self.print_first_line(self.args, self.notes())

    def uninstall(self) -> None:
        """Give all names and models back as they were. Call it between steps, on all ranks."""
        super().uninstall()
        while self._replaced:
            owner, name, plain = self._replaced.pop()
            setattr(owner, name, plain)

    def notes(self) -> list[str]:
        """Remarks on arguments that are allowed and have never run."""
        if not getattr(self.args, "offload_train", False):
            return []
        return ["offload_train=True has never run with Trimtab: it needs a GPU and torch_memory_saver"]

    @abstractmethod
    def replaced_topk(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of `topk`; it calls `choose` with the framework's choice and Megatron's."""

    def choose(self, replayed: ComputeTopk, own: ComputeTopk) -> ComputeTopk:
        """A router's top-k: what the session gives it in passes that it replays, else what the framework does.

        Args:
            replayed: the framework's, which replays its queue.
            own: Megatron's. It asks `router_replay`, which is Trimtab's, if this Megatron knows it.
        """

        def compute_topk(scores: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> Any:
            if self.adapter is None or not self.adapter.is_replaying:
                return replayed(scores, topk, *args, **kwargs)
            queue, stage = self.current(), self.stage()
            # As the framework does when it takes an entry.
            if stage == "replay_forward":
                queue.forward_index += 1
            elif stage == "replay_backward":
                queue.backward_index += 1
            if self._asks_router_replay:
                return own(scores, topk, *args, **kwargs)
            replay = self._routers[id(queue)].router_replay
            return replay.get_replay_topk(scores, topk, *args, default_compute_topk=own, **kwargs)

        return compute_topk

    def is_replayed(self, micro_batch: int, layers: Sequence[Any]) -> bool:
        stage = self.stage()
        if stage not in (*_UNPLANNED, *_PLANNED):
            raise InputError(f"{self.package} replays in stage {stage!r}; this version of Trimtab fits {self.fits}")
        return stage in _PLANNED

    def recorded(
        self, micro_batch: int, chunks: Sequence[Any], layers: Sequence[Any], session: MegatronSession
    ) -> MicroBatchRoutes:
        """The routing of a micro-batch, by its number in a pass."""
        queues = [self._queue_of(layer) for layer in layers]
        self._routers |= {id(queue): layer.router for queue, layer in zip(queues, layers, strict=True)}
        ids = [_on_host(queue.top_indices_list[queue.forward_index + micro_batch]) for queue in queues]
        return self.routes(torch.stack(ids, dim=1).numpy(), layers[0])

    def _ids_of(self, micro_batch: int, chunks: Sequence[Any]) -> MicroBatchRoutes | None:
        return super()._ids_of(micro_batch, chunks) if getattr(chunks[0], "role", "actor") == "actor" else None

    def _queue_of(self, layer: Any) -> Any:
        queue = getattr(layer.router, "routing_replay", None)
        if queue is None:
            raise InputError(
                f"MoE layer {layer.layer_number} has no routing_replay; is Megatron patched as {self.package} does it?"
            )
        return queue

    def _add_figures(self, result: Any) -> None:
        """Add figures to what `train_one_step` returns, losses for the logger on the last pipeline stage and others."""
        figures = self.figures()
        if result[0]:
            result[0].update(figures)

    def _suspending(self, plain: Callable[[], None]) -> Callable[[], None]:
        """Replaces `destroy_process_groups`, which a sleeping trainer calls before the device is handed over."""

        def destroy_process_groups() -> None:
            self.suspend()
            plain()

        return destroy_process_groups

    def _replace(self, owner: Any, name: str, replacement: Callable[[Any], Any]) -> None:
        plain = getattr(owner, name)
        self._replaced.append((owner, name, plain))
        setattr(owner, name, replacement(plain))

    def _refuse(self) -> None:
        """Raise InputError with the first option that is refused, and the number of others."""
        given, mode = vars(self.args), self.options.mode
        wrong = wrong_mode(self.package, mode, given.get("use_routing_replay", False))
        if not wrong and mode == "live" and not self._asks_router_replay:
            wrong = "mode=live needs routers with router_replay, which this Megatron does not have; use mode=plan"
        problems = [] if given.get("num_experts") else ["the model has no experts: num_experts is not set"]
        problems += [wrong] * bool(wrong) + refused(self.refused, given, mode) + megatron_refusals(mode, given)
        raise_first(self.package, problems)


def _on_host(ids: Any) -> torch.Tensor:
    """An entry of a queue, which may be read from a file when it is used."""
    if hasattr(ids, "materialize_for_routing_replay"):
        ids = ids.materialize_for_routing_replay("forward")
    tensor: torch.Tensor = ids.cpu()
    return tensor
