"""Megatron models whose experts move between optimizer steps, against the same without moves."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from helpers.megatron_runs import LENGTH, VOCABULARY, Layout, MegatronCase, Model
from trimtab.planner import Placement


def random_placement(rng: np.random.Generator, placement: Placement, ranks: int) -> Placement:
    """Other homes in about half of the layers."""
    home_LE = placement.home.copy()
    layers, experts = home_LE.shape
    for layer in range(layers):
        if rng.random() < 0.6:
            home_LE[layer] = rng.permutation(np.repeat(np.arange(ranks), experts // ranks)).astype(np.int16)
    return Placement(home_LE)


class Pair:
    """Two equal models, one with experts that move."""

    def __init__(self, layout: Layout, case: MegatronCase, **options: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        from trimtab.integrations.megatron import balance

        self.layout, self.case = layout, case
        self.function = get_forward_backward_func()
        self.plain, self.moving = Model(layout, case), Model(layout, case)
        for name, parameter in self.plain.named_parameters().items():
            self.moving.named_parameters()[name].data.copy_(parameter.data)
        for model in (self.plain, self.moving):
            model.optimizer.reload_model_params()
        self.session = balance(self.moving.chunks, **options)
        self.session.register_optimizer(self.moving.optimizer)
        # The ranks of an expert-parallel group and of those with the same experts draw the same homes.
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self.homes_rng = np.random.default_rng((case.seed, stage))
        data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self.tokens_rng = np.random.default_rng((case.seed, 1, data_rank))

    def tokens(self) -> torch.Tensor:
        micro_batches = 4 if self.layout.pipeline > 1 else 2
        return torch.from_numpy(self.tokens_rng.integers(0, VOCABULARY, (micro_batches, LENGTH)))

    def zero(self) -> None:
        for model in (self.plain, self.moving):
            for chunk in model.chunks:
                chunk.zero_grad_buffer()
            model.optimizer.zero_grad()

    def move(self) -> int:
        """Move experts at random; their number."""
        session = self.session.session
        if session is None:
            return 0
        before = session.placement
        after = random_placement(self.homes_rng, before, session.num_ranks)
        self.session.move(after)
        return int((before.home != after.home).sum())

    def difference(self) -> float:
        """The largest relative difference of a Parameter, main parameter or moment, with all experts at home."""
        self.session.return_home()
        worst = 0.0
        for (name, expected), (other, actual) in zip(_state(self.plain), _state(self.moving), strict=True):
            assert name == other
            error = float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))
            if error > 1e-4:
                print(self.case, dist.get_rank(), name, error, flush=True)
            worst = max(worst, error)
        return worst


def _state(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    from trimtab.integrations.megatron.optimizer_state import optimizers_in

    for chunk in model.chunks:
        if getattr(chunk.ddp_config, "overlap_param_gather", False):
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                group.start_param_sync(force_sync=True)
    for name, parameter in model.named_parameters().items():
        yield name, parameter.detach()
    for part, optimizer in enumerate(optimizers_in(model.optimizer)):
        parameters = [each for group in optimizer.optimizer.param_groups for each in group["params"]]
        for number, parameter in enumerate(parameters):
            yield f"optimizer {part}, parameter {number}", parameter.detach()
            for key, value in sorted(optimizer.optimizer.state[parameter].items()):
                if value is not None:
                    yield f"optimizer {part}, parameter {number}, {key}", value


def prepare(layout: Layout) -> None:
    """Megatron's groups on these ranks."""
    from megatron.core import parallel_state

    from trimtab.integrations.megatron.on_cpu import use_cpu

    torch.set_num_threads(1)
    use_cpu()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline,
            expert_model_parallel_size=layout.expert, expert_tensor_parallel_size=1,
        )  # fmt: skip


def save_checkpoints(layout: Layout, case: MegatronCase, folder: str, steps: int) -> None:
    """Train with and without moves, and save both models with Megatron's distributed checkpoints."""
    prepare(layout)
    pair = Pair(layout, case, mode="off")
    for _ in range(steps):
        pair.move()
        tokens_MBS = pair.tokens()
        pair.zero()
        for model in (pair.plain, pair.moving):
            model.run(pair.function, tokens_MBS)
            model.optimizer.step()
    pair.move()
    # The names of the experts' shards are those of their logical numbers, wherever they are.
    assert pair.session.have_moved
    save(pair.plain, f"{folder}/plain")
    save(pair.moving, f"{folder}/moving")


def sharded_state(model: Model, *, is_loading: bool = False) -> dict[str, Any]:
    """Model and optimizer for Megatron's distributed checkpoints."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
    state: dict[str, Any] = {}
    for number, chunk in enumerate(model.chunks):
        state[f"model{number}"] = chunk.module.sharded_state_dict(metadata=metadata)
    models = state["model0"] if len(model.chunks) == 1 else state
    optimizer = model.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    return {**state, "optimizer": optimizer}


def save(model: Model, folder: str) -> None:
    """Save model and optimizer."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    if dist.get_rank() == 0:
        os.makedirs(folder)
    dist.barrier()
    # Megatron writes in forked processes, which ranks that the launcher starts may not have.
    with (
        mock.patch.multiple(filesystem_async, _results_queue=queue.Queue(), _process_memory=lambda: 0),
        mock.patch.object(FileSystemWriterAsync, "write_preloaded_data_multiproc", staticmethod(_write)),
    ):
        dist_checkpointing.save(sharded_state(model), folder)


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


def load(model: Model, folder: str) -> None:
    """Load model and optimizer."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    state = dist_checkpointing.load(sharded_state(model, is_loading=True), folder)
    for number, chunk in enumerate(model.chunks):
        chunk.module.load_state_dict(state[f"model{number}"])
    plain = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(optimizer: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        # Megatron expects optimizers that count steps in their groups; torch's do it for each Parameter.
        state = optimizer._get_main_param_and_optimizer_states(parameter)
        plain(optimizer, parameter, {"step": state["step"], **tensors})

    with mock.patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", set_states):
        model.optimizer.load_state_dict(state["optimizer"])


def compare_checkpoints(layout: Layout, case: MegatronCase, folder: str) -> None:
    """The checkpoints of `save_checkpoints` are equal for Megatron without Trimtab, on any ranks."""
    prepare(layout)
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    models = [Model(layout, case) for _ in range(2)]
    for model, name in zip(models, ("plain", "moving"), strict=True):
        # Megatron's optimizers load state only into state.
        model.run(get_forward_backward_func(), torch.zeros(2, LENGTH, dtype=torch.int64))
        model.optimizer.step()
        load(model, f"{folder}/{name}")
    for (name, expected), (_, actual) in zip(_state(models[0]), _state(models[1]), strict=True):
        error = float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))
        assert error < (1e-12 if case.double else 2e-5), (name, error)
