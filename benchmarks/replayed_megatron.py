"""`ReplayedMegatron`: a Megatron model in DDP, and steps with recorded routing, of Megatron alone or planned.

A step is forward and backward of all micro-batches by Megatron's own schedule, with complete gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from trimtab.array_type import Array
from trimtab.calibration.measurement import this_device
from trimtab.integrations.megatron import MegatronSession

# The ids `[n, L, K]` of each micro-batch of a rank.
Routing = list[Array]


def start_megatron() -> None:
    """Make all ranks one expert-parallel group; without CUDA, replace its calls. Collective."""
    if not torch.cuda.is_available():
        from examples.megatron_on_cpu import use_cpu

        use_cpu()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )


def replayed(routing: Routing) -> list[torch.Tensor]:
    """For each micro-batch the ids as `RouterReplay` takes them, `[L, n, K]` int64, on this rank's device."""
    return [torch.from_numpy(ids.transpose(1, 0, 2).astype("int64")).to(this_device()) for ids in routing]


class ReplayedMegatron(ABC):
    """The model, and its steps.

    Args:
        model: its MoE layers have a `RouterReplay`.
        batches: of the micro-batches of a step, which `_forward` takes.
        shape: sequences and tokens of a micro-batch.

    Attributes:
        ddp: the model.
    """

    def __init__(
        self, model: Any, options: DistributedDataParallelConfig, batches: Sequence[Any], shape: tuple[int, int]
    ) -> None:
        self.ddp: Any = DistributedDataParallel(model.config, options, model)
        model.config.no_sync_func = self.ddp.no_sync
        self._replays = [layer.router.router_replay for layer in model.modules() if isinstance(layer, MoELayer)]
        self._batches, self._shape = batches, shape

    @abstractmethod
    def _forward(self, batches: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
        """Output of the next micro-batch, and the function of its loss."""

    def zero(self) -> None:
        """Zero all gradients."""
        self.ddp.zero_grad_buffer()

    def difference(self, expected: ReplayedMegatron) -> float:
        """The worst relative difference of a `main_grad` to that of another model, on any rank. Collective."""
        errors = [
            (mine.main_grad.float() - other.main_grad.float()).norm() / other.main_grad.float().norm().clamp_min(1e-6)
            for mine, other in zip(self.ddp.parameters(), expected.ddp.parameters(), strict=True)
        ]
        worst = torch.stack(errors).max()
        # NaN is not larger than others.
        worst = torch.where(worst.isfinite(), worst, torch.full_like(worst, torch.inf))
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return float(worst)

    def step(self, routing: Routing, session: MegatronSession) -> None:
        """A step that the session plans."""
        self._run(session.planned(get_forward_backward_func(), routing), self._forward)

    def step_with_replay(self, routing: Sequence[torch.Tensor]) -> None:
        """A step of Megatron alone, with recorded experts by its `RouterReplay`.

        Args:
            routing: of `replayed`.
        """
        for replay in self._replays:
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        self._run(get_forward_backward_func(), partial(self._forward_with_replay, iter(routing)))
        for replay in self._replays:
            replay.clear_indices()
            replay.clear_router_replay_action()

    def _run(self, forward_backward: Callable[..., Any], forward: Callable[..., Any]) -> None:
        sequences, length = self._shape
        forward_backward(
            forward_step_func=forward, data_iterator=iter(self._batches), model=self.ddp,
            num_microbatches=len(self._batches), seq_length=length, micro_batch_size=sequences, forward_only=False,
        )  # fmt: skip

    def _forward_with_replay(
        self, routing: Iterator[torch.Tensor], batches: Iterator[Any], model: Any
    ) -> tuple[torch.Tensor, Any]:
        for replay, ids_NK in zip(self._replays, next(routing), strict=True):
            replay.set_target_indices(ids_NK)
        return self._forward(batches, model)
