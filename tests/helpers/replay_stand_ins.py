"""Stand-ins of the modules of slime and miles that their plugins touch, and one loop that trains through them.

slime 624b824a8: slime/utils/routing_replay.py (RoutingReplay, the router's top-k), train_one_step of
slime/backends/megatron_utils/model.py, the order of passes of train_actor in actor.py beside it,
slime/utils/tensor_backper.py (weights of ref in the same Parameters), slime/utils/reloadable_process_group.py,
docker/patch/latest/megatron.patch (where Megatron's top-k is wrapped).
miles 31f1ca961: miles/utils/replay_base.py (Replay, BaseReplayManager), miles/backends/training_utils/replay_data.py
(-1 for tokens without a record), model.py, actor.py. radixark/Megatron-LM 2e64d788b, moe_utils.py: miles' fork, whose
top-k has no router_replay.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from helpers.own_source import load_module
from trimtab.array_type import Array


class Queue:
    """slime's RoutingReplay and miles' Replay."""

    def __init__(self) -> None:
        self.forward_index = 0
        self.backward_index = 0
        self.top_indices_list: list[torch.Tensor] = []

    def record(self, ids: torch.Tensor) -> None:
        self.top_indices_list.append(ids.to("cpu", copy=True))

    def pop_forward(self) -> torch.Tensor:
        self.forward_index += 1
        return self.top_indices_list[self.forward_index - 1].long()

    def pop_backward(self) -> torch.Tensor:
        self.backward_index += 1
        return self.top_indices_list[self.backward_index - 1].long()


def _module(name: str) -> Any:
    return ModuleType(name)


class StandIn:
    """A framework: its modules by name, the stage of its passes, and what its patch of Megatron's router does."""

    package: str
    topk_line: str
    """What its patch adds to Megatron's top-k."""
    replay: Any
    """The module with queues and top-k."""
    set_stage: Callable[..., None]
    get_stage: Callable[..., str]
    enter: Callable[..., None]
    """Called before a router's forward, with its queue."""

    def __init__(self) -> None:
        self.model = _module(f"{self.package}.backends.megatron_utils.model")
        self.actor = _module(f"{self.package}.backends.megatron_utils.actor")
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        self.model.get_forward_backward_func = get_forward_backward_func
        self.actor.destroy_process_groups = lambda: None

    def queue(self) -> Any:
        """Of a router."""
        return Queue()

    def modules(self) -> dict[str, ModuleType]:
        names = (
            self.package,
            f"{self.package}.utils",
            f"{self.package}.backends",
            f"{self.package}.backends.megatron_utils",
        )
        own = (self.model, self.actor, self.replay)
        return {name: ModuleType(name) for name in names} | {each.__name__: each for each in own}

    def forward_backward(self, **arguments: Any) -> Any:
        """A pass as the framework makes it: a list of chunks, and iterators of its own."""
        several = isinstance(arguments["model"], list)
        data, model = arguments["data_iterator"], arguments["model"]
        arguments["data_iterator"] = [OwnIterator(each) for each in (data if several else [data])]
        arguments["model"] = model if several else [model]
        own = arguments["forward_step_func"]
        arguments["forward_step_func"] = lambda iterator, model: own(iterator.batches, model)
        return self.model.get_forward_backward_func()(**arguments)

    def train_step(self, model: Any, tokens_MBS: torch.Tensor) -> float:
        """The forward and backward of train_one_step, with the stage that forwards have."""

        def replaying(**arguments: Any) -> Any:
            own = arguments["forward_step_func"]

            def forward_step(iterator: Any, chunk: Any) -> Any:
                before = self.get_stage()
                self.set_stage("replay_forward")
                output = own(iterator, chunk)
                self.set_stage(before)
                return output

            return self.forward_backward(**arguments | {"forward_step_func": forward_step})

        return float(model.run(masked(replaying), tokens_MBS))


class OwnIterator:
    """As `DataIterator`, which has no `__next__`."""

    def __init__(self, batches: Any) -> None:
        self.batches = iter(list(batches))


def masked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A pass whose loss does not read the last token, for which there is no route."""

    def run(*, forward_step_func: Any, **others: Any) -> Any:
        def forward_step(iterator: Any, model: Any) -> Any:
            output, loss_of = forward_step_func(iterator, model)
            mask = torch.ones_like(output)
            mask[:, -1] = 0
            return output, lambda losses: loss_of(losses * mask)

        return function(forward_step_func=forward_step, **others)

    return run


class Slime(StandIn):
    package = "slime"
    topk_line = (
        "    from slime.utils.routing_replay import get_routing_replay_compute_topk\n"
        "    compute_topk = get_routing_replay_compute_topk(compute_topk)\n"
    )

    def __init__(self) -> None:
        super().__init__()
        self.replay = _module("slime.utils.routing_replay")
        self.replay.RoutingReplay, self.replay.ROUTING_REPLAY = Queue, None
        self.replay.register_routing_replay = lambda module: None
        self.replay.get_routing_replay_compute_topk = self._compute_topk

        def train_one_step(
            args: Any, rollout_id: int, step_id: int, data_iterator: Any, model: Any, optimizer: Any,
            opt_param_scheduler: Any, num_microbatches: int, step_global_batch_size: int,
        ) -> Any:  # fmt: skip
            return {"loss": self.train_step(model, data_iterator)}, 0.0

        self.model.train_one_step = train_one_step

    def _compute_topk(self, old_compute_topk: Callable[..., Any]) -> Callable[..., Any]:
        def compute_topk(scores: Any, topk: int, num_groups: Any = None, group_topk: Any = None) -> Any:
            if os.environ.get("ENABLE_ROUTING_REPLAY", "0") != "1":
                return old_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            return choice(
                os.environ["ROUTING_REPLAY_STAGE"], self.replay.ROUTING_REPLAY, scores,
                lambda: old_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk),
            )  # fmt: skip

        return compute_topk

    def set_stage(self, stage: str) -> None:
        os.environ["ROUTING_REPLAY_STAGE"] = stage

    def get_stage(self) -> str:
        return os.environ["ROUTING_REPLAY_STAGE"]

    def enter(self, queue: Queue) -> None:
        self.replay.ROUTING_REPLAY = queue


class Miles(StandIn):
    package = "miles"
    topk_line = (
        "    from miles.utils.replay_base import routing_replay_manager\n"
        "    compute_topk = routing_replay_manager.get_topk_fn(compute_topk, return_probs=True)\n"
    )

    def __init__(self) -> None:
        super().__init__()
        folder = os.environ.get("MILES")
        self.replay = load_module(folder, "miles.utils.replay_base") if folder else _replay_base()
        self.replay.routing_replay_manager.enabled = True

        def train_one_step(
            args: Any, rollout_id: int, step_id: int, data_iterator: Any, model: Any, optimizer: Any,
            opt_param_scheduler: Any, num_microbatches: int, num_rollouts: int, witness_info: Any, attempt: int,
        ) -> Any:  # fmt: skip
            return {"loss": self.train_step(model, data_iterator)}, 0.0, "NORMAL"

        self.model.train_one_step = train_one_step

    def set_stage(self, stage: str) -> None:
        self.replay.routing_replay_manager.stage = stage

    def get_stage(self) -> str:
        return str(self.replay.routing_replay_manager.stage)

    def enter(self, queue: Queue) -> None:
        self.replay.routing_replay_manager.current = queue

    def queue(self) -> Any:
        return self.replay.Replay()


def _replay_base() -> Any:
    """The stand-in of miles.utils.replay_base."""
    module = _module("miles.utils.replay_base")
    module.Replay = Queue

    class BaseReplayManager:
        def __init__(self) -> None:
            self.stage, self.enabled, self.current = "fallthrough", False, None

        def get_current(self) -> Any:
            return self.current

        def register_to_module(self, module: Any, attr_name: str, stream_idx: int | None = None) -> None:
            pass

        def get_topk_fn(self, old_topk_fn: Callable[..., Any], return_probs: bool) -> Callable[..., Any]:
            assert return_probs

            def new_topk_fn(scores: Any, topk: int, *args: Any, **kwargs: Any) -> Any:
                plain = partial(old_topk_fn, scores, topk, *args, **kwargs)
                return choice(self.stage, self.current, scores, plain) if self.enabled else plain()

            return new_topk_fn

    module.BaseReplayManager = BaseReplayManager
    module.routing_replay_manager = BaseReplayManager()
    return module


def choice(stage: str, queue: Any, scores: torch.Tensor, plain: Callable[[], Any]) -> Any:
    """A router's scores and experts in a stage of the framework. miles gives rows of -1 the first experts."""
    if stage == "fallthrough":
        return plain()
    if stage == "record":
        probs, ids = plain()
        queue.record(ids)
        return probs, ids
    ids = queue.pop_forward() if stage == "replay_forward" else queue.pop_backward()
    assert len(ids) == len(scores)
    ids = torch.where((ids == -1).all(-1, keepdim=True), torch.arange(ids.shape[1]), ids)
    return scores.gather(1, ids), ids


STAND_INS: dict[str, type[StandIn]] = {"slime": Slime, "miles": Miles}


@contextmanager
def stand_in(package: str) -> Iterator[StandIn]:
    """A framework whose modules can be imported, and Megatron with its patch. Models built in it have queues."""
    from megatron.core.transformer.moe import moe_utils, router

    found = STAND_INS[package]()
    plain_init = router.TopKRouter.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        self.routing_replay = found.queue()
        self.register_forward_pre_hook(lambda module, _: found.enter(module.routing_replay))

    with ExitStack() as stack:
        for name, module in found.modules().items():
            # `mock.patch.dict` would forget other modules that are imported meanwhile.
            sys.modules[name] = module
            stack.callback(sys.modules.pop, name)
        stack.enter_context(mock.patch.dict(os.environ, ENABLE_ROUTING_REPLAY="1", ROUTING_REPLAY_STAGE="fallthrough"))
        stack.enter_context(mock.patch.object(router.TopKRouter, "__init__", init))
        # miles' fork of Megatron has the lines itself.
        if "router_replay" in inspect.signature(moe_utils.topk_routing_with_score_function).parameters:
            patched = patched_topk(found)
            stack.enter_context(mock.patch.object(moe_utils, "topk_routing_with_score_function", patched))
            called = patched if package == "slime" else lambda *args, router_replay, **kwargs: patched(*args, **kwargs)
            stack.enter_context(mock.patch.object(router, "topk_routing_with_score_function", called))
        yield found


def patched_topk(framework: StandIn | type[StandIn]) -> Callable[..., Any]:
    """Megatron's top-k with the lines of the framework's patch; without `router_replay` in miles' fork."""
    from megatron.core.transformer.moe import moe_utils

    source = inspect.getsource(moe_utils.topk_routing_with_score_function)
    line = '    if score_function == "softmax":\n'
    assert source.count(line) == 1
    source = source.replace(line, framework.topk_line + line)
    if framework.package == "miles":
        parameter = "    router_replay: Optional['RouterReplay'] = None,\n"
        assert source.count(parameter) == 1
        source = source.replace(parameter, "").replace("router_replay is None", "True")
    names = dict(vars(moe_utils))
    exec(source, names)
    patched: Callable[..., Any] = names["topk_routing_with_score_function"]
    return patched


def arguments(**more: Any) -> SimpleNamespace:
    """The framework's arguments, of the model of `megatron_runs`."""
    values: dict[str, Any] = {
        "use_routing_replay": True, "use_rollout_routing_replay": True, "num_layers": 3, "num_experts": 8,
        "moe_layer_freq": [0, 1, 1], "expert_model_parallel_size": 2,
    }  # fmt: skip
    return SimpleNamespace(**values | more)


def some_routes(rng: np.random.Generator, shape: tuple[int, int], *, unknown: bool) -> Array:
    """Recorded experts `[n, L, 2]`. With `unknown` the last token has none, and token 2 none in the last layer."""
    ids = rng.permuted(np.broadcast_to(np.arange(8), (*shape, 8)), axis=-1)[..., :2].astype(np.int32)
    if unknown:
        ids[-1] = -1
        ids[2, -1] = -1
    return ids


def queues_of(model: Any) -> list[Queue]:
    return [layer.router.routing_replay for layer in model.moe_layers()]


def run_rollout(
    framework: StandIn, model: Any, steps_SMBS: Sequence[torch.Tensor], routes: Sequence[Array] | None
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """A rollout as train_actor goes through it: reference, log-probabilities, optimizer steps.

    Args:
        steps_SMBS: the tokens of each optimizer step.
        routes: the recorded experts of all micro-batches; None if the pass of log-probabilities records them.

    Returns:
        Losses and gradients by name, and what the framework would log of each step.
    """
    queues, logged = queues_of(model), []
    found: dict[str, Any] = {}
    for ids in routes or ():
        for layer, queue in enumerate(queues):
            queue.record(torch.from_numpy(ids[:, layer]))

    def log_probs(tokens_MBS: torch.Tensor) -> float:
        with torch.no_grad():
            return float(model.run(masked(framework.forward_backward), tokens_MBS, forward_only=True))

    framework.set_stage("fallthrough")
    with weights_of_reference(model):
        found["ref"] = [log_probs(tokens) for tokens in steps_SMBS]
    framework.set_stage("record" if routes is None else "replay_forward")
    found["log_probs"] = [log_probs(tokens) for tokens in steps_SMBS]
    for queue in queues:
        queue.forward_index = 0
    framework.set_stage("replay_backward")
    for step, tokens_MBS in enumerate(steps_SMBS):
        model.zero()
        more = () if framework.package == "slime" else (None, 0)
        result = framework.model.train_one_step(
            arguments(), 0, step, tokens_MBS, model, model.optimizer, None, len(tokens_MBS), 8, *more
        )
        logged.append(result[0])
        found |= {f"{step} {name}": p.main_grad.clone() for name, p in model.named_parameters().items()}
        found[f"{step} loss"] = result[0]["loss"]
        model.optimizer.step()
    framework.set_stage("fallthrough")
    # As assert_all_consumed.
    found["consumed"] = [(each.forward_index, each.backward_index, len(each.top_indices_list)) for each in queues]
    for queue in queues:
        queue.forward_index, queue.backward_index, queue.top_indices_list = 0, 0, []
    return found, logged


@contextmanager
def weights_of_reference(model: Any) -> Iterator[None]:
    """As `TensorBackuper`: weights of another model are copied into the same Parameters, and back."""
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters().items()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters().items():
            parameter.copy_(
                kept[name] + 0.1 * torch.randn(kept[name].shape, generator=generator, dtype=kept[name].dtype)
            )
        yield
        for name, parameter in model.named_parameters().items():
            parameter.copy_(kept[name])


class ReloadableProcessGroup(dist.ProcessGroup):
    """A group that is destroyed and created again behind the same object. All calls go to the group that it has now."""

    created: list[ReloadableProcessGroup] = []  # noqa: RUF012

    def __init__(self, group: Any, make: Callable[[], Any]) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.group, self.make = group, make
        ReloadableProcessGroup.created.append(self)


def _forwarding(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.group, name)(*args, **kwargs)


def _reading(name: str) -> Callable[[Any], Any]:
    return lambda self: getattr(self.group, name)


for _name in dir(dist.ProcessGroup):
    if callable(getattr(dist.ProcessGroup, _name)) and not _name.startswith("__") and not _name[0].isupper():
        setattr(ReloadableProcessGroup, _name, _forwarding(_name))
for _name in ("bound_device_id", "group_name", "group_desc", "_device_types"):
    setattr(ReloadableProcessGroup, _name, property(_reading(_name)))


_MESSAGES = ("send", "recv")


@contextmanager
def reloadable_groups() -> Iterator[Callable[[], None]]:
    """While it is open, `new_group` makes such groups, and functions of torch.distributed take them.

    Yields:
        A function that destroys all groups and WORLD, and creates them again.
    """
    plain_new_group, generation = dist.new_group, 0

    def new_group(*args: Any, **kwargs: Any) -> Any:
        group = plain_new_group(*args, **kwargs)
        is_member = isinstance(group, dist.ProcessGroup)
        return ReloadableProcessGroup(group, partial(plain_new_group, *args, **kwargs)) if is_member else group

    def inner(value: Any) -> Any:
        return value.group if isinstance(value, ReloadableProcessGroup) else value

    def unwrapping(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*map(inner, args), **{name: inner(value) for name, value in kwargs.items()})

        return call

    def reload() -> None:
        nonlocal generation
        generation += 1
        store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        dist.barrier()
        dist.destroy_process_group()
        # Names of groups count from 0 again.
        dist.init_process_group("gloo", store=PrefixStore(f"reloaded {generation}", store), rank=rank, world_size=ranks)
        for group in ReloadableProcessGroup.created:
            group.group = group.make()

    functions: dict[str, Any] = {
        name: unwrapping(value)
        for name, value in vars(dist).items()
        # `P2POp` knows these by identity.
        if inspect.isfunction(value) and "group" in inspect.signature(value).parameters and name[1:] not in _MESSAGES
    }
    with mock.patch.multiple(dist, **functions | {"new_group": new_group}):
        try:
            yield reload
        finally:
            ReloadableProcessGroup.created.clear()
