"""`ReplayPlugin`: balance in frameworks that keep recorded routing in queues of the routers, as slime and miles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch

from trimtab.errors import InputError
from trimtab.framework_names import check_names
from trimtab.integrations.framework_options import megatron_refusals, raise_first, read_options, refused, wrong_mode
from trimtab.integrations.megatron.layer_numbers import moe_layers
from trimtab.integrations.megatron.option_tables import Option
from trimtab.integrations.options import MODES
from trimtab.integrations.plugin_report import first_line, print_on_first_rank, step_figures
from trimtab.integrations.routers import asks_router_replay
from trimtab.integrations.schedule import MicroBatchRoutes, ScheduleAdapter

ComputeTopk = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_UNPLANNED = ("fallthrough", "record")
_PLANNED = ("replay_forward", "replay_backward")
_NO_IDS = np.empty((0, 0, 0), np.int16)


class ReplayPlugin(ABC):
    """A framework whose routers have queues of recorded ids: `router.routing_replay.top_indices_list`, an entry
    `[n, K]` for every micro-batch of the rollout, `forward_index` for the next forward, and `backward_index` for the
    next recomputation in a backward.

    Passes whose stage is `replay_forward` or `replay_backward` are planned. In them routers ask Trimtab, and the
    indices go on as in the framework. Experts keep their homes: these frameworks copy weights of other models into the
    same Parameters by position.

    Args:
        args: the framework's arguments.

    Attributes:
        package, fits: the framework's package, and its versions for which the plugin was written.
        names: names of the framework that the plugin replaces or reads, see `check_names`.
        refused: arguments of the framework that are refused, beside those of Megatron.
        model, actor: modules with the schedule's name and `train_one_step`, and with `destroy_process_groups`.
        topk: the function that returns a router's top-k, as in `names`.
    """

    package: ClassVar[str]
    fits: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    refused: ClassVar[tuple[Option, ...]]
    model: ClassVar[str]
    actor: ClassVar[str]
    topk: ClassVar[str]

    def __init__(self, args: Any) -> None:
        self.args = args
        self.options = read_options((*MODES, "rehome"))
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
        line = first_line(self.package, self.options, self.args, self.notes())
        if self.options.mode == "off":
            print_on_first_rank(line)
            return
        self._asks_router_replay = asks_router_replay()
        self._refuse()
        check_names(self.names, fits=self.fits)
        model, actor = import_module(self.model), import_module(self.actor)
        self.adapter = ScheduleAdapter(model, self._ids_of)
        self.adapter.install()
        self._replace(model, "train_one_step", self._with_figures)
        self._replace(actor, "destroy_process_groups", self._suspending)
        module, _, path = self.topk.partition(":")
        *classes, name = path.split(".")
        self._replace(reduce(getattr, classes, import_module(module)), name, self.replaced_topk)
        print_on_first_rank(line)

    def uninstall(self) -> None:
        """Give all names and models back as they were. Call it between steps, on all ranks."""
        if self._replaced:
            self.adapter.uninstall()
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
            if not self.adapter.is_replaying:
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

    def _ids_of(self, micro_batch: int, chunks: Sequence[Any]) -> MicroBatchRoutes | None:
        """The routing of a micro-batch, by its number in a pass; see `ScheduleAdapter`."""
        if getattr(chunks[0], "role", "actor") != "actor":
            return None
        layers = moe_layers(chunks)
        if not layers:
            return None
        if self.options.mode == "live":
            self.adapter.balance(chunks, self.options)
            return MicroBatchRoutes(_NO_IDS)
        stage = self.stage()
        if stage is None or stage in _UNPLANNED:
            return None
        if stage not in _PLANNED:
            raise InputError(f"{self.package} replays in stage {stage!r}; this version of Trimtab fits {self.fits}")
        queues = [self._queue_of(layer) for layer in layers]
        if self.adapter.session_of(chunks) is None:
            self._routers |= {id(queue): layer.router for queue, layer in zip(queues, layers, strict=True)}
            self.adapter.balance(chunks, self.options)
        ids = [_on_host(queue.top_indices_list[queue.forward_index + micro_batch]) for queue in queues]
        return self.routes(torch.stack(ids, dim=1).numpy(), layers[0])

    def _queue_of(self, layer: Any) -> Any:
        queue = getattr(layer.router, "routing_replay", None)
        if queue is None:
            raise InputError(
                f"MoE layer {layer.layer_number} has no routing_replay; is Megatron patched as {self.package} does it?"
            )
        return queue

    def _with_figures(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces `train_one_step`, which returns losses for the framework's logger on the last pipeline stage."""

        def train_one_step(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            for session in self.adapter.sessions:
                figures = step_figures(session)
                if result[0]:
                    result[0].update(figures)
            return result

        return train_one_step

    def _suspending(self, plain: Callable[[], None]) -> Callable[[], None]:
        """Replaces `destroy_process_groups`, which a sleeping trainer calls before the device is handed over."""

        def destroy_process_groups() -> None:
            for session in self.adapter.sessions:
                if session.session is not None:
                    session.session.suspend()
            plain()

        return destroy_process_groups

    def _replace(self, owner: Any, name: str, replacement: Callable[[Any], Any]) -> None:
        plain = getattr(owner, name)
        self._replaced.append((owner, name, plain))
        setattr(owner, name, replacement(plain))

    def _refuse(self) -> None:
        """Raise InputError with the first option that is refused, and the number of others."""
        given = vars(self.args)
        problems = [] if given.get("num_experts") else ["the model has no experts: num_experts is not set"]
        mode = self.options.mode
        problems += self._refused_modes() + refused(self.refused, given, mode) + megatron_refusals(mode, given)
        raise_first(self.package, problems)

    def _refused_modes(self) -> list[str]:
        mode = self.options.mode
        problem = wrong_mode(self.package, mode, getattr(self.args, "use_routing_replay", False))
        if not problem and mode == "live" and not self._asks_router_replay:
            problem = "mode=live needs routers with router_replay, which this Megatron does not have; use mode=plan"
        return [problem] if problem else []


def _on_host(ids: Any) -> torch.Tensor:
    """An entry of a queue, which may be read from a file when it is used."""
    if hasattr(ids, "materialize_for_routing_replay"):
        ids = ids.materialize_for_routing_replay("forward")
    tensor: torch.Tensor = ids.cpu()
    return tensor
