"""Weights of Megatron models as the exporters of RL frameworks yield them, with names of Hugging Face.

Stand-ins: they gather and number experts as the named code does. Experts are in `TEGroupedMLP`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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


def bridge_pairs(model: Model, *, grouped: bool) -> Iterator[NamedTensor]:
    """Megatron-Bridge 067f987df, src/megatron/bridge/models/conversion/model_bridge.py,
    `stream_weights_megatron_to_hf`: parameters of all stages in the order of their names; `gather_from_ep_ranks` in
    param_mapping.py beside it numbers experts. Grouped, the experts of a layer leave in one tensor."""
    from megatron.core import parallel_state

    pipeline = parallel_state.get_pipeline_model_parallel_group()
    experts = parallel_state.get_expert_model_parallel_group()
    count = model.config.num_moe_experts // experts.size()
    mine = {
        _of_model(name, model): parameter.detach()
        for chunk in model.models
        for name, parameter in chunk.named_parameters()
    }
    stages: list[Any] = [None] * pipeline.size()
    dist.all_gather_object(stages, {name: (value.shape, value.dtype) for name, value in mine.items()}, group=pipeline)
    specs = {name: (stage, *spec) for stage, of_stage in enumerate(stages) for name, spec in of_stage.items()}
    groups: dict[str, dict[int, torch.Tensor]] = {}
    for name in sorted(specs):
        stage, shape, dtype = specs[name]
        value = mine[name] if stage == pipeline.rank() else torch.empty(shape, dtype=dtype)
        dist.broadcast(value, group=pipeline, group_src=stage)
        found = _EXPERT.search(name)
        if not found:
            yield from _converted(name, value)
            continue
        for rank, each in enumerate(_gathered(value, experts)):
            number = rank * count + int(found[3])
            if not grouped:
                yield from _converted(f"{name[: found.start(3)]}{number}", each)
                continue
            weights = groups.setdefault(f"{found[1]}.{found[2]}", {})
            weights[number] = each
            if len(weights) == model.config.num_moe_experts:
                what = "gate_up_proj" if found[2] == "1" else "down_proj"
                stack = torch.stack([weights[expert] for expert in range(len(weights))])
                yield f"model.layers.{found[1]}.mlp.experts.{what}", stack


def _of_model(name: str, model: Model) -> str:
    """The name with the number of the layer in the whole model."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    local = re.match(r"decoder\.layers\.(\d+)\.", name)
    if not local:
        return name
    return f"decoder.layers.{int(local[1]) + get_transformer_layer_offset(model.config)}.{name[local.end() :]}"


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
