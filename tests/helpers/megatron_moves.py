"""Megatron models whose experts move between optimizer steps, against the same without moves."""

from __future__ import annotations

import logging
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
from helpers.random_plans import random_group_plans, random_placement
from trimtab.planner import Placement, PlannedStep, Schedule
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.runtime import step_planner

RESHARDABLE, BY_POSITION = "fully_reshardable", "dp_reshardable"


def other_homes(rng: np.random.Generator, placement: Placement, ranks: int, *, everywhere: bool = False) -> Placement:
    """Other homes in about half of the layers, or in all."""
    moves_L = everywhere | (rng.random(len(placement.home)) < 0.6)
    layers, experts = placement.home.shape
    other = random_placement(rng, layers, experts, ranks)
    return Placement(np.where(moves_L[:, None], other.home, placement.home))


class Pair:
    """Two equal models, one with experts that move; it counts moves over all layers, and replicas of planned steps."""

    def __init__(self, layout: Layout, case: MegatronCase, *, positional: Any = "return_home", **options: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        from trimtab.integrations.megatron import balance

        self.layout, self.case = layout, case
        self.function = get_forward_backward_func()
        self.plain = Model(layout, case)
        self.moving = self.plain.copy()
        self.plain.optimizer.reload_model_params()
        self.session = balance(self.moving.chunks, **options)
        self.session.register_optimizer(self.moving.optimizer, positional=positional)
        self.moved = self.replicas = 0
        # The ranks of an expert-parallel group and of those with the same experts draw the same homes.
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self._homes_rng = np.random.default_rng((case.seed, stage))
        self._plans_rng = np.random.default_rng((case.seed, 2, stage))
        # Drawn alike by the first ranks of all groups, which plan.
        self._planned_homes_rng = np.random.default_rng((case.seed, 3, stage))
        data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self._tokens_rng = np.random.default_rng((case.seed, 1, data_rank))

    def tokens(self) -> torch.Tensor:
        """Tokens of the next step."""
        micro_batches = 4 if self.layout.pipeline > 1 else 2
        return torch.from_numpy(self._tokens_rng.integers(0, VOCABULARY, (micro_batches, LENGTH)))

    def zero(self) -> None:
        """Zero all gradients, as before a step."""
        self.plain.zero()
        self.moving.zero()

    def move(self, *, everywhere: bool = False) -> None:
        """Move experts at random."""
        session = self.session.session
        if session is not None:
            before = session.placement
            self.session.move(other_homes(self._homes_rng, before, session.num_ranks, everywhere=everywhere))
            self.moved += int((before.home != session.placement.home).sum())

    def live_step(self, tokens_MBS: torch.Tensor) -> None:
        """Forward and backward of both models, with the routers' choices."""
        for model in (self.plain, self.moving):
            model.run(self.function, tokens_MBS)

    def planned_step(self, tokens_MBS: torch.Tensor) -> None:
        """As `live_step`, with a random plan: other homes, and replicas."""
        routing = self.plain.record(self.function, tokens_MBS)
        self.zero()
        self.plain.run(self.function, tokens_MBS)
        with mock.patch.object(step_planner, "plan_schedule", self._random_plans):
            self.moving.run(self.session.planned(self.function, routing), tokens_MBS)
        report = self.session.report
        if report is not None:
            self.moved += report.homes_moved
            self.replicas += report.replicas

    def _random_plans(
        self, loads: StepLoads, schedule: Schedule, placement: Placement, _cluster: Any, *, may_move: bool,
        **_chosen: Any,
    ) -> PlannedStep:  # fmt: skip
        """Replaces the planner on the first rank of each group."""
        assert self.session.session is not None
        assert may_move
        topology = self.session.session.topology
        placement = other_homes(self._planned_homes_rng, placement, topology.num_ranks)
        return random_group_plans(self._plans_rng, loads, schedule, placement, topology.ranks_per_node)

    def train(self, steps: int) -> None:
        """Steps of both: live ones and planned ones with replicas; experts move before live ones."""
        for step in range(steps):
            tokens_MBS = self.tokens()
            self.zero()
            if step % 3 == 1:
                self.planned_step(tokens_MBS)
            else:
                self.move(everywhere=step == 0)
                self.live_step(tokens_MBS)
            for model in (self.plain, self.moving):
                model.optimizer.step()

    def gather_parameters(self) -> None:
        """Complete the parameters that the distributed optimizers have updated in parts."""
        for model in (self.plain, self.moving):
            for chunk in model.chunks:
                if chunk.ddp_config.overlap_param_gather:
                    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                        group.start_param_sync(force_sync=True)

    def check_export(self, tolerance: float) -> None:
        """What an exporter yields for the model with moves has the names and values of the one without."""
        renamed = dict(self.session.logical_names(exported_pairs(self.moving)))
        plain = dict(exported_pairs(self.plain))
        assert renamed.keys() == plain.keys()
        for name, expected in plain.items():
            error = relative_error(renamed[name].double(), expected.double())
            assert error <= tolerance, (self.case, name, error)

    def difference(self) -> float:
        """The largest relative difference of parameters, buffers and moments, with all experts at home."""
        self.gather_parameters()
        self.session.return_home()
        return _difference(self.moving, self.plain)


def exported_pairs(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """The Parameters of all experts and layers of this stage, numbered by layer of the model and by position, as verl's
    `per_tensor_generator` (utils/megatron_utils.py, 1dda039b9) makes them."""
    from megatron.core import parallel_state

    group = parallel_state.get_expert_model_parallel_group()
    for layer in model.moe_layers():
        count = layer.num_local_experts
        for name, parameter in layer.experts.named_parameters():
            gathered = [torch.empty_like(parameter) for _ in range(group.size())]
            dist.all_gather(gathered, parameter.detach(), group=group)
            local = re.search(r"(?<=local_experts\.)\d+|(?<=weight)\d+$|(?<=bias)\d+$", name)
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


def save_checkpoints(layout: Layout, case: MegatronCase, folder: str, steps: int) -> None:
    """Train with and without moves, and save both models with Megatron's distributed checkpoints."""
    use_layout(layout)
    pair = Pair(layout, case)
    for _ in range(steps):
        pair.move()
        pair.zero()
        pair.live_step(pair.tokens())
        for model in (pair.plain, pair.moving):
            model.optimizer.step()
    pair.move(everywhere=True)
    assert pair.session.have_moved
    save(pair.plain, f"{folder}/plain")
    save(pair.moving, f"{folder}/moving")


def save_with_caches(layout: Layout, case: MegatronCase, folder: str, keeps_plan: bool) -> None:
    """Save at home, and after moves, by a strategy that assumes that shards stay (`ckpt_assume_constant_structure`)."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    use_layout(layout)
    pair = Pair(layout, case)
    pair.zero()
    pair.live_step(pair.tokens())
    for model in (pair.plain, pair.moving):
        model.optimizer.step()
    inner = TorchDistSaveShardedStrategy("torch_dist", 1)
    inner.use_cached_ckpt_structure = keeps_plan
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(inner, group, do_cache_distribution=True)
    for number in range(2):
        save(pair.moving, f"{folder}/{number}", strategy)
    pair.move(everywhere=True)
    assert pair.session.have_moved
    save(pair.plain, f"{folder}/plain")
    save(pair.moving, f"{folder}/moving", strategy)


def save_by_position(layout: Layout, case: MegatronCase, folder: str) -> None:
    """Experts return before a checkpoint by position, and are trained and moved after it."""
    use_layout(layout)
    pair = Pair(layout, case)
    for step in range(2):
        pair.move(everywhere=True)
        assert pair.session.have_moved
        pair.zero()
        pair.live_step(pair.tokens())
        for model in (pair.plain, pair.moving):
            model.optimizer.step()
        assert pair.session.have_moved
        with mock.patch.object(logging.getLogger("trimtab"), "warning") as warning:
            states = [sharded_state(model, kind=BY_POSITION) for model in (pair.moving, pair.plain)]
        assert [call.args[1][:28] for call in warning.call_args_list] == ["experts have returned to the"] * (
            step + dist.get_rank() == 0
        )
        assert not pair.session.have_moved
        assert [*_shards(states[0])] == [*_shards(states[1])]
    save(pair.plain, f"{folder}/plain", kind=BY_POSITION)
    pair.move(everywhere=True)
    save(pair.moving, f"{folder}/moving", kind=BY_POSITION)


def _shards(state: Any) -> Iterator[tuple[str, Any]]:
    """Keys and places of a state's shards."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor):
            yield shard.key, shard.global_offset


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


def save(model: Model, folder: str, strategy: Any = None, *, kind: str = RESHARDABLE) -> None:
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
        dist_checkpointing.save(
            sharded_state(model, kind=kind), folder, strategy, validate_access_integrity=not strategy
        )


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


def compare_checkpoints(layout: Layout, case: MegatronCase, folder: str, kind: str = RESHARDABLE) -> None:
    """The checkpoints of `save_checkpoints` are equal for Megatron without Trimtab, on any ranks."""
    use_layout(layout)
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    models = [Model(layout, case) for _ in range(2)]
    for model, name in zip(models, ("plain", "moving"), strict=True):
        # Megatron's optimizers load state only into state.
        model.run(get_forward_backward_func(), torch.zeros(2, LENGTH, dtype=torch.int64))
        model.optimizer.step()
        load(model, f"{folder}/{name}", kind)
    assert _difference(models[1], models[0]) < (1e-12 if case.double else 2e-5)
