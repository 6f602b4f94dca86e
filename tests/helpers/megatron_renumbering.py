"""Megatron models whose experts get other ids between optimizer steps, against the same with the first ids."""

from __future__ import annotations

import os
import queue
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from helpers.equality import relative_error
from helpers.megatron_runs import LENGTH, VOCABULARY, Layout, MegatronCase, Model, use_layout
from helpers.random_plans import random_group_plans
from trimtab.array_type import Array
from trimtab.planner import Placement, PlannedStep, Schedule
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.runtime import step_planner
from trimtab.trace.numbering import Numbering, permute_ids, random_orders

RESHARDABLE, BY_POSITION = "fully_reshardable", "dp_reshardable"


class Pair:
    """Two equal models, one that is renumbered; it counts experts with other ids, and replicas of planned steps."""

    def __init__(self, layout: Layout, case: MegatronCase, **options: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        from trimtab.integrations.megatron import balance

        self.layout, self.case = layout, case
        self.function = get_forward_backward_func()
        self.plain = Model(layout, case)
        self.other = self.plain.copy()
        self.plain.optimizer.reload_model_params()
        self.session = balance(self.other.chunks, **options)
        self.session.register_optimizer(self.other.optimizer)
        self.renumbered = self.replicas = 0
        layers = [*self.plain.moe_layers()]
        self.groups = (layers[0].config.moe_router_num_groups or 1) if layers else 1
        # The first id of each one of now.
        self.first_LE = np.array([np.arange(layer.config.num_moe_experts) for layer in layers])
        # The ranks of a stage draw the same orders.
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self._orders_rng = np.random.default_rng((case.seed, stage))
        self._plans_rng = np.random.default_rng((case.seed, 2, stage))
        data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self._tokens_rng = np.random.default_rng((case.seed, 1, data_rank))

    def tokens(self) -> torch.Tensor:
        """Tokens of the next step."""
        micro_batches = 4 if self.layout.pipeline > 1 else 2
        return torch.from_numpy(self._tokens_rng.integers(0, VOCABULARY, (micro_batches, LENGTH)))

    def zero(self) -> None:
        """Zero all gradients, as before a step."""
        self.plain.zero()
        self.other.zero()

    def random_order(self) -> Array:
        """Of all layers, or of about half of them."""
        layers, experts = self.first_LE.shape
        order_LE = random_orders(layers, experts, int(self._orders_rng.integers(1 << 30)), self.groups)
        stays_L = self._orders_rng.random(layers) < self._orders_rng.choice([0.0, 0.4])
        return np.where(stays_L[:, None], np.arange(experts), order_LE)

    def renumber(self, order_LE: Array | None = None) -> None:
        """Give experts other ids, at random by default."""
        if self.session.session is not None:
            order_LE = self.random_order() if order_LE is None else order_LE
            assert self.session.renumber(order_LE) == (np.diff(order_LE) != 1).any()
            self.first_LE = np.take_along_axis(self.first_LE, order_LE, axis=1)
            self.renumbered += int((np.diff(order_LE) != 1).sum())

    def live_step(self, tokens_MBS: torch.Tensor) -> None:
        """Forward and backward of both models, with the routers' choices."""
        for model in (self.plain, self.other):
            model.run(self.function, tokens_MBS)

    def planned_step(self, tokens_MBS: torch.Tensor) -> None:
        """As `live_step`, with random replicas, and ids recorded at first or now."""
        routing, numbering = self.plain.record(self.function, tokens_MBS), self.session.numbering
        if numbering is not None:
            if self._plans_rng.random() < 0.5:
                numbering = Numbering()
            else:
                routing = [permute_ids(ids, self.first_LE, self.first_LE.shape[1]) for ids in routing]
        self.zero()
        self.plain.run(self.function, tokens_MBS)
        with mock.patch.object(step_planner, "plan_schedule", self._random_plans):
            self.other.run(self.session.planned(self.function, routing, numbering=numbering), tokens_MBS)
        if self.session.report is not None:
            self.replicas += self.session.report.replicas

    def _random_plans(
        self, loads: StepLoads, schedule: Schedule, placement: Placement, *_: Any, **_chosen: Any
    ) -> PlannedStep:
        """Replaces the planner on the first rank of each group."""
        assert self.session.session is not None
        per_node = self.session.session.topology.ranks_per_node
        return random_group_plans(self._plans_rng, loads, schedule, placement, per_node)

    def train(self, steps: int) -> None:
        """Live steps and planned ones with replicas; experts get other ids before gradients are zeroed, or after."""
        for step in range(steps):
            if step % 3 != 1:
                self.renumber()
            tokens_MBS = self.tokens()
            self.zero()
            if step % 3 == 1:
                self.planned_step(tokens_MBS)
            else:
                if step % 6 == 5:
                    self.renumber()
                self.live_step(tokens_MBS)
            for model in (self.plain, self.other):
                model.optimizer.step()

    def gather_parameters(self) -> None:
        """Complete the parameters that the distributed optimizers have updated in parts."""
        for model in (self.plain, self.other):
            for chunk in model.chunks:
                if chunk.ddp_config.overlap_param_gather:
                    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                        group.start_param_sync(force_sync=True)

    def weights_error(self) -> float:
        """The largest relative difference of experts and routers under their own names, by the ids of now."""
        self.gather_parameters()
        worst = 0.0
        orders = [torch.from_numpy(first_E) for first_E in self.first_LE]
        plain, other = dict(exported_pairs(self.plain)), dict(exported_pairs(self.other))
        assert plain.keys() == other.keys()
        for order, mine, whole in zip(orders, self.other.moe_layers(), self.plain.moe_layers(), strict=True):
            head = f"decoder.layers.{mine.layer_number - 1}.mlp.experts."
            for name, value in other.items():
                if name.startswith(head):
                    local = re.search(_EXPERT, name)
                    assert local
                    first = f"{name[: local.start()]}{order[int(local[0])]}{name[local.end() :]}"
                    worst = max(worst, relative_error(value.double(), plain[first].double()))
            for value, wanted in zip(_of_router(mine), _of_router(whole), strict=True):
                worst = max(worst, relative_error(value.double(), wanted[order].double()))
        return worst

    def difference(self) -> float:
        """The largest relative difference of parameters, buffers and moments, with all experts under their first
        ids."""
        self.gather_parameters()
        if self.renumbered:
            self.renumber(np.argsort(self.first_LE, axis=1))
        return _difference(self.other, self.plain)


_EXPERT = r"(?<=local_experts\.)\d+|(?<=weight)\d+$|(?<=bias)\d+$"


def _of_router(layer: Any) -> list[torch.Tensor]:
    router = layer.router
    tensors = (router.weight, getattr(router, "bias", None), router.expert_bias, router.local_tokens_per_expert)
    return [tensor.detach() for tensor in tensors if tensor is not None]


def exported_pairs(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """The Parameters of all experts and layers of this stage, numbered by layer of the model and by expert, as verl's
    `per_tensor_generator` (utils/megatron_utils.py, 1dda039b9) makes them."""
    from megatron.core import parallel_state

    group = parallel_state.get_expert_model_parallel_group()
    for layer in model.moe_layers():
        count = layer.num_local_experts
        for name, parameter in layer.experts.named_parameters():
            gathered = [torch.empty_like(parameter) for _ in range(group.size())]
            dist.all_gather(gathered, parameter.detach(), group=group)
            local = re.search(_EXPERT, name)
            assert local
            for rank, values in enumerate(gathered):
                position = rank * count + int(local[0])
                renamed = f"{name[: local.start()]}{position}{name[local.end() :]}"
                yield f"decoder.layers.{layer.layer_number - 1}.mlp.experts.{renamed}", values


def _state(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    from trimtab.integrations.megatron.optimizer_state import optimizers_in

    for name, parameter in model.named_parameters().items():
        yield name, parameter.detach()
    for each in model.models:
        # The bias of experts, and the tokens that it follows.
        yield from ((name, buffer) for name, buffer in each.named_buffers() if buffer is not None)
    for part, optimizer in enumerate(optimizers_in(model.optimizer)):
        parameters = [each for group in optimizer.optimizer.param_groups for each in group["params"]]
        for number, parameter in enumerate(parameters):
            yield f"optimizer {part}, parameter {number}", parameter.detach()
            for key, value in sorted(optimizer.optimizer.state[parameter].items()):
                if value is not None:
                    yield f"optimizer {part}, parameter {number}, {key}", value


def _difference(model: Model, expected: Model) -> float:
    """The largest relative difference of parameters, buffers and moments."""
    worst = 0.0
    for (name, wanted), (other, value) in zip(_state(expected), _state(model), strict=True):
        assert name == other
        worst = max(worst, relative_error(value.double(), wanted.double()))
    return worst


def save_checkpoints(layout: Layout, case: MegatronCase, folder: str, steps: int, kind: str = RESHARDABLE) -> None:
    """Train both models, and save them with Megatron's distributed checkpoints."""
    use_layout(layout)
    pair = Pair(layout, case)
    for _ in range(steps):
        pair.renumber()
        pair.zero()
        pair.live_step(pair.tokens())
        for model in (pair.plain, pair.other):
            model.optimizer.step()
    pair.renumber()
    save(pair.plain, f"{folder}/plain", kind=kind)
    save(pair.other, f"{folder}/other", kind=kind)


def sharded_state(model: Model, *, is_loading: bool = False, kind: str = RESHARDABLE) -> dict[str, Any]:
    """Model and optimizer for Megatron's distributed checkpoints."""
    metadata = {
        "distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }  # fmt: skip
    state: dict[str, Any] = {}
    for number, chunk in enumerate(model.chunks):
        state[f"model{number}"] = chunk.module.sharded_state_dict(metadata=metadata)
    models = state["model0"] if len(model.chunks) == 1 else state
    optimizer = model.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    return {**state, "optimizer": optimizer}


def save(model: Model, folder: str, *, kind: str = RESHARDABLE) -> None:
    """Save model and optimizer."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    if dist.get_rank() == 0:
        os.makedirs(folder)
    dist.barrier()
    with (
        mock.patch.multiple(filesystem_async, _results_queue=queue.Queue(), _process_memory=lambda: 0),
        ExitStack() as stack,
    ):
        # Before 0.18 Megatron writes in forked processes, which ranks that the launcher starts may not have.
        if hasattr(FileSystemWriterAsync, "write_preloaded_data_multiproc"):
            write = staticmethod(_write)
            stack.enter_context(mock.patch.object(FileSystemWriterAsync, "write_preloaded_data_multiproc", write))
        dist_checkpointing.save(sharded_state(model, kind=kind), folder)


def _write(transforms: Any, _msc: Any, _rank: int, buckets: list[Any], results: Any) -> None:
    """Megatron's writer, in this process."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        result: queue.Queue[Any] = queue.Queue()
        done = mock.Mock()
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, result, done, use_fsync=False)
        written[number] = result.get()[1]
    results.put(written)


def load(model: Model, folder: str, kind: str = RESHARDABLE) -> None:
    """Load model and optimizer."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from trimtab.integrations.megatron.optimizer_state import optimizers_in

    state = dist_checkpointing.load(sharded_state(model, is_loading=True, kind=kind), folder)
    for number, chunk in enumerate(model.chunks):
        chunk.module.load_state_dict(state[f"model{number}"])
    plain = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(optimizer: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        # Megatron expects optimizers that count steps in their groups; torch's do it for each Parameter.
        state = optimizer._get_main_param_and_optimizer_states(parameter)
        plain(optimizer, parameter, {"step": state["step"], **tensors})

    # In float32 main parameters are the Parameters.
    with torch.no_grad(), mock.patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", set_states):
        model.optimizer.load_state_dict(state["optimizer"])
    for part in optimizers_in(model.optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                # torch's have one number for each Parameter, and Megatron lets them share it.
                of_one = part.optimizer.state[parameter]
                of_one["step"] = torch.tensor(float(group.get("step", of_one["step"])))


def compare_checkpoints(layout: Layout, case: MegatronCase, folder: str, kind: str = RESHARDABLE) -> None:
    """Megatron without Trimtab loads the checkpoints of `save_checkpoints`, on any ranks, and trains on alike."""
    use_layout(layout)
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    models = [Model(layout, case) for _ in range(2)]
    losses: list[list[float]] = []
    tokens_MBS = torch.from_numpy(np.random.default_rng(1).integers(0, VOCABULARY, (4, LENGTH)))
    for model, name in zip(models, ("plain", "other"), strict=True):
        # Megatron's optimizers load state only into state.
        model.run(get_forward_backward_func(), torch.zeros(4, LENGTH, dtype=torch.int64))
        model.optimizer.step()
        load(model, f"{folder}/{name}", kind)
        losses.append([])
        for _ in range(2):
            model.zero()
            losses[-1].append(model.run(get_forward_backward_func(), tokens_MBS))
            model.optimizer.step()
        losses[-1].append(model.run(get_forward_backward_func(), tokens_MBS, forward_only=True))
    error = relative_error(*(torch.tensor(of_model, dtype=torch.float64) for of_model in losses))
    assert error < (1e-3 if case.bf16 else 2e-6), (losses, error)
