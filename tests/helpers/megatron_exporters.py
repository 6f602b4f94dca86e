"""Weights of Megatron models as the exporters of RL frameworks yield them, with names of Hugging Face.

Stand-ins: they gather and number experts as the named code does. Experts are in `TEGroupedMLP`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import starmap
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from helpers.megatron_runs import Model

if TYPE_CHECKING:
    from trimtab.integrations.megatron.logical_order import NamedTensor

_EXPERT = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.linear_fc([12])\.weight(\d+)")


def verl_pairs(model: Model) -> Iterator[NamedTensor]:
    """verl 0.7.0, verl/utils/megatron_utils.py, `per_tensor_generator`: tensor by tensor, from all stages to all ranks.

    It takes the names of buffers from `state_dict()`.
    """
    from megatron.core import parallel_state

    pipeline = parallel_state.get_pipeline_model_parallel_group()
    experts = parallel_state.get_expert_model_parallel_group()
    mine: list[tuple[str, torch.Tensor]] = []
    for chunk in model.models:
        parameters = dict(chunk.named_parameters())
        mine += parameters.items()
        state = chunk.state_dict()
        mine += [
            (name, value) for name, value in state.items() if name not in parameters and "_extra_state" not in name
        ]
    stages: list[Any] = [None] * pipeline.size()
    dist.all_gather_object(
        stages, [(_of_model(name, model), value.shape, value.dtype) for name, value in mine], group=pipeline
    )
    for stage, specs in enumerate(stages):
        for number, (name, shape, dtype) in enumerate(specs):
            value = mine[number][1].detach() if stage == pipeline.rank() else torch.empty(shape, dtype=dtype)
            dist.broadcast(value, group=pipeline, group_src=stage)
            if ".mlp.experts.linear_fc" not in name:
                yield from _converted(name, value)
                continue
            prefix, local = name.split(".weight")
            count = model.config.num_moe_experts // experts.size()
            for rank, each in enumerate(_gathered(value, experts)):
                yield from _converted(f"{prefix}.weight{rank * count + int(local)}", each)


def slime_lists(model: Model, size: int = 3) -> Iterator[list[NamedTensor]]:
    """slime 624b824a8, slime/backends/megatron_utils/update_weight/update_weight_from_distributed.py, `_send_weights`:
    each pipeline stage sends its own weights, in lists, from its first data-parallel rank; others yield nothing."""
    from megatron.core import parallel_state

    experts = parallel_state.get_expert_model_parallel_group()
    sends = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    first = experts.rank() * model.config.num_moe_experts // experts.size()
    of_experts, others = [], []
    for chunk in model.models:
        for name, parameter in chunk.named_parameters():
            name = _of_model(name, model)
            found = _EXPERT.search(name)
            if found:
                of_experts.append((f"{name[: found.start(3)]}{first + int(found[3])}", parameter.detach()))
            else:
                others += _converted(name, parameter.detach())
    if sends:
        yield others
    for start in range(0, len(of_experts), size):
        batch = of_experts[start : start + size]
        names: list[Any] = [None] * experts.size()
        dist.all_gather_object(names, [name for name, _ in batch], group=experts)
        values = [_gathered(value, experts) for _, value in batch]
        if sends:
            yield [
                pair
                for rank, of_rank in enumerate(names)
                for name, by_rank in zip(of_rank, values, strict=True)
                for pair in _converted(name, by_rank[rank])
            ]


class WeightTuple(NamedTuple):
    """As `HFWeightTuple` of Megatron-Bridge."""

    param_name: str
    weight: torch.Tensor


class MegatronModelBridge:
    """Megatron-Bridge 067f987df, src/megatron/bridge/models/conversion/model_bridge.py.

    Parameters of all stages in the order of their names; `gather_from_ep_ranks` in param_mapping.py beside it numbers
    experts.

    Args:
        grouped: the experts of a layer leave in one tensor.
    """

    def __init__(self, *, grouped: bool = False) -> None:
        self.grouped = grouped

    def build_conversion_tasks(self, models: Sequence[Any]) -> dict[str, torch.Tensor]:
        """This stage's Parameters by name, which NeMo-RL and others keep."""
        return {
            _of_chunk(name, chunk): parameter.detach()
            for chunk in models
            for name, parameter in chunk.named_parameters()
        }

    def stream_weights_megatron_to_hf(
        self, megatron_model: Sequence[Any], conversion_tasks: dict[str, torch.Tensor] | None = None
    ) -> Iterator[WeightTuple]:
        """All ranks get all weights."""
        from megatron.core import parallel_state

        pipeline = parallel_state.get_pipeline_model_parallel_group()
        experts = parallel_state.get_expert_model_parallel_group()
        mine = conversion_tasks or self.build_conversion_tasks(megatron_model)
        num_experts = megatron_model[0].config.num_moe_experts
        stages: list[Any] = [None] * pipeline.size()
        own = {name: (value.shape, value.dtype) for name, value in mine.items()}
        dist.all_gather_object(stages, own, group=pipeline)
        specs = {name: (stage, *spec) for stage, of_stage in enumerate(stages) for name, spec in of_stage.items()}
        groups: dict[str, dict[int, torch.Tensor]] = {}
        for name in sorted(specs):
            stage, shape, dtype = specs[name]
            value = mine[name] if stage == pipeline.rank() else torch.empty(shape, dtype=dtype)
            dist.broadcast(value, group=pipeline, group_src=stage)
            found = _EXPERT.search(name)
            if not found:
                yield from starmap(WeightTuple, _converted(name, value))
                continue
            for rank, each in enumerate(_gathered(value, experts)):
                number = rank * num_experts // experts.size() + int(found[3])
                if not self.grouped:
                    yield from starmap(WeightTuple, _converted(f"{name[: found.start(3)]}{number}", each))
                    continue
                weights = groups.setdefault(f"{found[1]}.{found[2]}", {})
                weights[number] = each
                if len(weights) == num_experts:
                    what = "gate_up_proj" if found[2] == "1" else "down_proj"
                    stack = torch.stack([weights[expert] for expert in range(len(weights))])
                    yield WeightTuple(f"model.layers.{found[1]}.mlp.experts.{what}", stack)


def bridge_pairs(model: Model, *, grouped: bool) -> Iterator[NamedTensor]:
    """`MegatronModelBridge` here."""
    return MegatronModelBridge(grouped=grouped).stream_weights_megatron_to_hf(model.models)


class MegatronQuantizationBridge:
    """quant_bridge.py beside it, which is a mixin there."""

    def stream_weights_megatron_to_hf_quant(
        self, megatron_model: Sequence[Any], conversion_tasks: Any = None
    ) -> Iterator[WeightTuple]:
        """As `MegatronModelBridge` here; a weight and its scales."""
        plain = vars(MegatronModelBridge)["stream_weights_megatron_to_hf"]
        plain = getattr(plain, "__wrapped__", plain)
        for name, value in plain(MegatronModelBridge(), megatron_model, conversion_tasks):
            yield WeightTuple(name, value)
            yield WeightTuple(f"{name}_scale_inv", value.abs().amax(keepdim=True))


class GPTBridge:
    """mcore-bridge 1.6.5 (ms-swift), mcore_bridge/bridge/gpt_bridge.py: goes through modules, and reads no names."""

    def export_weights(self, mg_models: Sequence[Any], only_master_rank: bool = False) -> Iterator[tuple[str, Any]]:
        """`_set_mlp_state`: without a pipeline."""
        from megatron.core import parallel_state

        group = parallel_state.get_expert_model_parallel_group()
        for layer in mg_models[0].decoder.layers:
            experts: Any = getattr(layer.mlp, "experts", None)
            for number in range(getattr(experts, "num_local_experts", 0)):
                for linear in ("linear_fc1", "linear_fc2"):
                    weight = getattr(getattr(experts, linear), f"weight{number}").detach()
                    for rank, each in enumerate(_gathered(weight, group)):
                        expert = rank * experts.num_local_experts + number
                        name = f"decoder.layers.{layer.layer_number - 1}.mlp.experts.{linear}.weight{expert}"
                        for renamed, part in _converted(name, each):
                            yield renamed, None if only_master_rank and dist.get_rank() else part

    def load_weights(self, mg_models: Sequence[Any], hf_model_dir: str) -> None:
        """By position."""


class MegatronEngine:
    """verl 0.9.1, verl/workers/engine/megatron/transformer_impl.py, with `checkpoint_engine.backend=delta_sharded`.

    `index` is built once, by Megatron-Bridge's tasks.
    """

    def __init__(self, index: dict[str, torch.Tensor]) -> None:
        self.index = index

    def get_per_tensor_param_shard(self) -> tuple[Iterator[NamedTensor], None]:
        """This rank's weights, by position."""
        return iter(self.index.items()), None


class MegatronPolicyWorkerImpl(MegatronEngine):
    """NeMo-RL 7ea279abf, nemo_rl/models/policy/workers/megatron_policy_worker.py; keeps Bridge's tasks, too."""

    def nccl_reshard_refit(self, kv_scales: Any = None) -> list[NamedTensor]:
        """What it sends, by `hf_to_local_param_map`."""
        return list(self.index.items())


def execute_reshard_plan(tensors: dict[str, torch.Tensor]) -> list[NamedTensor]:
    """Megatron-LM d98e8a64d, megatron/core/resharding/refit.py: `get_refit_tensor_dict` keeps them."""
    return list(tensors.items())


STAND_INS: dict[str, list[Any]] = {
    "megatron.bridge.models.conversion.model_bridge": [MegatronModelBridge],
    "megatron.bridge.models.conversion.quant_bridge": [MegatronQuantizationBridge],
    "mcore_bridge.bridge.gpt_bridge": [GPTBridge],
    "verl.workers.engine.megatron.transformer_impl": [MegatronEngine],
    "nemo_rl.models.policy.workers.megatron_policy_worker": [MegatronPolicyWorkerImpl],
    "megatron.core.resharding.refit": [execute_reshard_plan],
}
"""By the module in whose place they are imported."""


@contextmanager
def stand_ins() -> Iterator[dict[str, Any]]:
    """Modules with the stand-ins in `sys.modules`, by name."""
    modules: dict[str, Any] = {name: ModuleType(name) for name in STAND_INS}
    for name, module in modules.items():
        vars(module).update({each.__name__: each for each in STAND_INS[name]})
    with mock.patch.dict(sys.modules, modules):
        yield modules


def slime_names(model: Model) -> dict[str, torch.Tensor]:
    """slime 624b824a8, slime/backends/megatron_utils/update_weight/common.py, `named_params_and_buffers`; the same in
    miles 31f1ca961, miles/backends/megatron_utils/update_weight/common.py."""
    return {_of_model(name, model): value for chunk in model.models for name, value in chunk.named_parameters()}


def saved_weight_gradients(model: Model) -> dict[str, torch.Tensor]:
    """Megatron-LM d98e8a64d, megatron/training/training.py, `_save_state_dict` for `--save-wgrads-interval`."""
    return {name: value.main_grad for chunk in model.models for name, value in chunk.named_parameters()}


def _of_model(name: str, model: Model) -> str:
    return _of_chunk(name, model)


def _of_chunk(name: str, chunk: Any) -> str:
    """The name with the number of the layer in the whole model."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    name = name.replace("module.", "")
    local = re.match(r"decoder\.layers\.(\d+)\.", name)
    if not local:
        return name
    return f"decoder.layers.{int(local[1]) + get_transformer_layer_offset(chunk.config)}.{name[local.end() :]}"


def _gathered(value: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    found = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(found, value.contiguous(), group=group)
    return found


def _converted(name: str, value: torch.Tensor) -> list[NamedTensor]:
    """The weights of experts as Qwen3-MoE has them; others stay as they are."""
    found = _EXPERT.search(name)
    if not found:
        return [(name, value)]
    prefix = f"model.layers.{found[1]}.mlp.experts.{found[3]}"
    if found[2] == "2":
        return [(f"{prefix}.down_proj.weight", value)]
    gate, up = value.chunk(2)
    return [(f"{prefix}.gate_proj.weight", gate), (f"{prefix}.up_proj.weight", up)]
