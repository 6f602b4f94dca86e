"""transformers' own expert parallelism, with the experts of a model in a `Session`.

`from_pretrained` shards such models: experts over the ranks, and each rank's experts wrapped in FSDP2, which owns the
parameters, their gradients and their optimizer state. The session reads the shards to make replicas, and adds replica
gradients to those that FSDP receives. Call `register` before loading and `use_session` after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

from trimtab.errors import InputError
from trimtab.integrations.transformers.distributed_experts import auxiliary_loss, check_experts, follow_layer
from trimtab.integrations.transformers.families import family_of, moe_blocks
from trimtab.runtime import ExpertLayer, Session

NAME = "trimtab"


def register() -> None:
    """Register `ep_implementation="trimtab"` of `DistributedConfig` with transformers."""
    EPImplementationInterface.register(NAME, SessionExperts)


def use_session(model: Any, session: Session) -> None:
    """Run the experts of a loaded model in a session, with routing replay. Before this call they run as "all_to_all".

    Gradients, clipping, optimizer and checkpoints remain those of FSDP2; `session.finish_gradients()` must be called
    before every optimizer step. Not a collective.

    Args:
        model: from `from_pretrained`, with a `DistributedConfig` of `ep_implementation="trimtab"`.
        session: without layers; one expert-parallel group of all ranks.

    Raises:
        InputError: if the model's type is not supported, or model and session don't match. The model is then unchanged.
    """
    family = family_of(model.config)
    blocks = moe_blocks(model)
    if session.layers or session.optimizers:
        raise InputError(
            f"the session has {len(session.layers)} layers and {len(session.optimizers)} optimizers already; give the "
            "model a new session, and train it as FSDP2 does"
        )
    for index, block in blocks.items():
        _check_place(block.experts, f"the experts of decoder layer {index}", session)
        check_experts(family, block.experts, index, session.num_experts)
    config = model.config.distributed_config
    if config.fsdp_cpu_offload:
        raise InputError("the experts are offloaded to the CPU between uses; load the model without fsdp_cpu_offload")
    session.auxiliary_loss = partial(auxiliary_loss, model.config)
    for block in blocks.values():
        experts = block.experts
        sharded = [getattr(experts, name) for name in family.parameters]
        masters = [_local(parameter) for parameter in sharded]
        experts.ep_implementation.layer = layer = session.add_layer(
            partial(_read, sharded, masters),
            family.apply(experts),
            compute_dtype=torch.bfloat16 if config.fsdp_mixed_precision else None,
            weights=partial(_weights, experts, family.parameters, masters),
        )
        follow_layer(getattr(block, family.router), layer, model.config)


class SessionExperts(AllToAllEP):
    """Runs the experts of one MoE layer: in the session once there is one, before that by transformers' all-to-all.

    Raises:
        InputError: if the run has tensor parallelism, or expert parallelism is not over all ranks.
    """

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        ranks = dist.get_world_size()
        if tp_mesh.size() > 1 or ep_mesh.size() != ranks:
            raise InputError(
                f"{NAME!r} experts need ep_size = fsdp_size = all {ranks} ranks and tp_size = 1; this model has "
                f"ep_size = {ep_mesh.size()} and tp_size = {tp_mesh.size()}"
            )
        super().__init__(experts, ep_mesh, tp_mesh)
        self.layer: ExpertLayer | None = None
        experts.ep_implementation = self  # type: ignore[assignment]

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        run = super().__call__ if self.layer is None else self.layer
        output: torch.Tensor = run(hidden_states, top_k_index, top_k_weights)
        return output


def _check_place(experts: nn.Module, where: str, session: Session) -> None:
    implementation = getattr(experts, "ep_implementation", None)
    if not isinstance(implementation, SessionExperts):
        raise InputError(
            f"{where} are not run by {NAME!r}; load the model with "
            f"DistributedConfig(fsdp_size=N, ep_size=N, ep_implementation={NAME!r})"
        )
    if implementation.layer is not None:
        raise InputError(f"{where} are in another session already; a model can be in one")
    ranks = dist.get_process_group_ranks(implementation.ep_mesh.get_group())
    if session.topology.ranks_by_position != ranks:
        raise InputError(f"{where} are spread over ranks {ranks}; the session should have these in one group")


def _local(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's experts of a parameter sharded by FSDP, in the same memory."""
    assert isinstance(parameter, DTensor)
    local: torch.Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
    return nn.Parameter(local, requires_grad=parameter.requires_grad)


def _read(sharded: Sequence[DTensor], masters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
    """The parameters of `_local`, updated to the memory that FSDP uses now."""
    for parameter, master in zip(sharded, masters, strict=True):
        if master.data_ptr() != parameter._local_tensor.data_ptr():
            master.data = parameter._local_tensor.detach()
    return masters


def _weights(experts: nn.Module, names: Sequence[str], masters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """The tensors that FSDP puts into the module while it runs, in the graph. Masters get their `requires_grad`."""
    weights: list[torch.Tensor] = [getattr(experts, name) for name in names]
    if torch.is_grad_enabled():
        for master, weight in zip(masters, weights, strict=True):
            master.requires_grad_(weight.requires_grad)
    return weights
