"""`MegatronState`: what Megatron's optimizers keep of experts and routers, which is renumbered with them."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.integrations.megatron.option_tables import IMMOVABLE, immovable
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts, parameters_of
from trimtab.runtime.state.optimizer_rows import ExpertState, RowParts, StateRows, any_nonzero, name_of_tensor

SUPPORTED = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)


def optimizers_in(optimizer: Any) -> list[Any]:
    """The optimizers in one of Megatron's, without those that hold no Parameters.

    Raises:
        InputError: if experts can't be renumbered with the state of one of them, with its name and the reason.
    """
    chained = optimizer.chained_optimizers if type(optimizer) is ChainedOptimizer else [optimizer]
    optimizers = [one for one in chained if not getattr(one, "is_stub_optimizer", False)]
    for one in optimizers:
        problem = _problem(one)
        if problem:
            raise InputError(f"experts can't be renumbered with the state of {type(one).__name__}: {problem}")
    return optimizers


def _problem(optimizer: Any) -> str:
    """Why experts can't be renumbered with the state of an optimizer; "" if they can."""
    if type(optimizer) not in SUPPORTED:
        return f"use one of {', '.join(kind.__name__ for kind in SUPPORTED)}"
    config, ddp = optimizer.config, getattr(optimizer, "ddp_config", None)
    options = {option.name: getattr(config, option.name, None) for option in IMMOVABLE}
    if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
        options["optimizer_cpu_offload"] = True
    if problems := immovable(options):
        return "; ".join(problems.values())
    if ddp is not None and ddp.use_megatron_fsdp:
        return "with use_megatron_fsdp no rank has whole experts; use Megatron's DistributedDataParallel"
    if ddp is not None and ddp.num_distributed_optimizer_instances > 1:
        return f"num_distributed_optimizer_instances is {ddp.num_distributed_optimizer_instances}; it should be 1"
    return ""


@dataclass(frozen=True)
class _Held:
    """What a rank's distributed optimizer holds of one tensor of its home experts.

    Attributes:
        ranges: for each row the first element and the one after the last.
        dtypes: of the state by key, from any row that it holds.
        steps: different numbers of optimizer steps in the state.
    """

    ranges: list[tuple[int, int]]
    dtypes: dict[str, torch.dtype]
    steps: set[float]


class MegatronState(ExpertState):
    """What Megatron's optimizers keep of the experts.

    Args:
        optimizers: see `optimizers_in`.
        layers: the experts.
    """

    def __init__(self, optimizers: list[Any], topology: Topology, layers: Sequence[HomeExperts]) -> None:
        super().__init__(
            [one.optimizer for one in optimizers if not isinstance(one, DistributedOptimizer)], _main_parameters
        )
        self._distributed = [one for one in optimizers if isinstance(one, DistributedOptimizer)]
        self._topology, self._layers = topology, layers
        # Gradients that the last optimizer step has used, as long as nothing is added to them.
        self._used: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()

    def gradients_wait(self, layer: HomeExperts) -> bool:
        return any_nonzero(each for each in layer.gradients if self._used.get(each) != each._version)

    def note_step(self) -> None:
        """Call it after each optimizer step. Megatron zeroes gradients only before the next forward."""
        self._used.clear()
        for layer in self._layers:
            self._used.update((each, each._version) for each in layer.gradients)

    def form(self, layer: HomeExperts, t: int) -> object:
        return [super().form(layer, t), *(type(one).__name__ for one in self._distributed)]

    def rows(self, layer: HomeExperts) -> list[StateRows]:
        # Main parameters are state, too.
        main: list[StateRows] = []
        for t, tensor in enumerate(layer.tensors):
            parameters = _main_parameters(layer, t)
            if self._optimizers and parameters[0] is not parameters_of(tensor)[0]:
                main.append([parameter.detach() for parameter in parameters])
        return main + super().rows(layer)

    def part_bytes(self, layer: HomeExperts) -> int:
        held = sum(
            elements.nbytes
            for t in range(len(layer.likes))
            for row in range(len(layer.home_experts))
            for elements in self._part(layer, t, row)[1].values()
        )
        return held // len(layer.home_experts)

    def row_parts(self, layers: Sequence[HomeExperts]) -> list[list[RowParts]]:
        """State of distributed optimizers; see `ExpertState`.

        Raises:
            InputError: on all ranks, if optimizers hold different parts on the ranks of an expert-parallel group, or
                have made different numbers of steps.
        """
        if not self._distributed:
            return [[] for _ in layers]
        mine = [[self._held_of(layer, t) for t in range(len(layer.likes))] for layer in layers]
        held_DLT: list[Any] = [None] * self._topology.num_data_ranks
        dist.all_gather_object(held_DLT, mine, group=self._topology.control)
        return [
            self._parts_of_layer(layer, list(zip(*held_DT, strict=True)))
            for layer, held_DT in zip(layers, zip(*held_DLT, strict=True), strict=True)
        ]

    def permute_others(self, layers: Sequence[HomeExperts], order_LE: Array) -> None:
        """The state that distributed optimizers have of routers; see `ExpertState`."""
        for one in self._distributed:
            found = [
                (tensor, torch.from_numpy(order_E).to(tensor.device))
                for layer, order_E in zip(layers, order_LE, strict=True)
                for tensor in layer.declared
                if isinstance(tensor, nn.Parameter)
            ]
            mine = [self._shard_of(one, parameter) for parameter, _ in found]
            # Ranks without a part of a tensor don't know which state it has.
            dtypes_R: list[Any] = [None] * one.data_parallel_group.size()
            dtypes = [{key: value.dtype for key, value in moving.items()} for _, moving, _ in mine]
            dist.all_gather_object(dtypes_R, dtypes, group=one.data_parallel_group)
            for n, ((parameter, order), ((start, end), moving, _)) in enumerate(zip(found, mine, strict=True)):
                for key, dtype in sorted({key: of for dtypes in dtypes_R for key, of in dtypes[n].items()}.items()):
                    whole = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
                    if key in moving:
                        whole[start:end] = moving[key]
                    dist.all_reduce(whole, group=one.data_parallel_group)
                    if key in moving:
                        moving[key].copy_(whole.view(parameter.shape)[order].view(-1)[start:end])

    def _parts_of_layer(self, layer: HomeExperts, held_TD: Sequence[Sequence[_Held]]) -> list[RowParts]:
        parts: list[RowParts] = []
        for t, held_D in enumerate(held_TD):
            ranges_GRH2 = np.array([held.ranges for held in held_D], np.int64).reshape(
                self._topology.groups, self._topology.num_ranks, -1, 2
            )
            where = f"the distributed optimizer's state of {name_of_tensor(layer, t)}"
            if (ranges_GRH2 != ranges_GRH2[:, :1]).any():
                raise InputError(f"{where} is split differently on the ranks of an expert-parallel group")
            if len(set().union(*(held.steps for held in held_D))) > 1:
                raise InputError(f"{where} has made different numbers of steps; they should be equal")
            dtypes = {key: dtype for held in held_D for key, dtype in held.dtypes.items()}
            states = [self._part(layer, t, row)[1] for row in range(len(layer.home_experts))]
            for key in sorted(dtypes):
                nothing = torch.empty(0, dtype=dtypes[key], device=layer.device)
                parts.append(RowParts([state.get(key, nothing) for state in states], ranges_GRH2[:, 0]))
        return parts

    def _held_of(self, layer: HomeExperts, t: int) -> _Held:
        """What this rank holds of a tensor."""
        dtypes: dict[str, torch.dtype] = {}
        ranges, steps = [], set()
        for row in range(len(layer.home_experts)):
            held, state, step = self._part(layer, t, row)
            ranges.append(held)
            dtypes |= {key: elements.dtype for key, elements in state.items()}
            steps |= step
        return _Held(ranges, dtypes, steps)

    def _part(
        self, layer: HomeExperts, t: int, row: int
    ) -> tuple[tuple[int, int], dict[str, torch.Tensor], set[float]]:
        """Of one expert's tensor: `_shard_of` the distributed optimizer that has it."""
        parameter = parameters_of(layer.tensors[t])[row]
        found = (self._shard_of(one, parameter) for one in self._distributed)
        return next((held for held in found if held[0] != (0, 0)), ((0, 0), {}, set()))

    @staticmethod
    def _shard_of(one: Any, parameter: Any) -> tuple[tuple[int, int], dict[str, torch.Tensor], set[float]]:
        """Of a Parameter: the range of elements that this rank's distributed optimizer holds, the state of it, and the
        number of steps."""
        if parameter not in one.model_param_gbuf_map:
            return (0, 0), {}, set()
        held = one._get_model_param_range_map(parameter)["param"]
        state = one._get_main_param_and_optimizer_states(parameter)
        steps = {float(value) for value in state.values() if _is_number(value)}
        # In float32 the main parameter is part of the Parameter's memory, and moves with it.
        moving = {
            key: value.detach().view(-1)
            for key, value in state.items()
            if not _is_number(value) and value.untyped_storage().data_ptr() != _storage(parameter)
        }
        return (held.start, held.end), moving, steps


def _main_parameters(layer: HomeExperts, t: int) -> list[Any]:
    """The Parameters that optimizers other than the distributed one update: float32 copies, if there are any."""
    return [
        parameter if getattr(parameter, "main_param", None) is None else parameter.main_param  # type: ignore[attr-defined]
        for parameter in parameters_of(layer.tensors[t])
    ]


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.ndim == 0


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
