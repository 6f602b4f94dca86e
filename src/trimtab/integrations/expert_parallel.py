"""transformers' own expert parallelism, with the experts of a model in a `Session`.

`from_pretrained` shards such models by a `DistributedConfig`: experts over `ep_size` ranks, and each rank's experts by
FSDP2 over the ranks that have the same ones (`fsdp`). Call `register` before loading, and `session_of` after it; or
`use_session` with a session of your own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

from trimtab.errors import InputError
from trimtab.integrations.fsdp import add_fsdp_layer
from trimtab.integrations.transformers.distributed_experts import auxiliary_loss, check_experts, follow_layer
from trimtab.integrations.transformers.families import (
    choose_experts,
    expert_products,
    expert_tensors,
    moe_blocks,
    num_experts,
    router_of,
)
from trimtab.runtime import ExpertLayer, Session

NAME = "trimtab"


def register() -> None:
    """Register `ep_implementation="trimtab"` of `DistributedConfig` with transformers."""
    EPImplementationInterface.register(NAME, SessionExperts)


def session_of(model: Any, *, compute_dtype: torch.dtype | None = None, **options: Any) -> Session:
    """A new session of the model's expert-parallel groups, in which its experts run. Collective over all ranks.

    Args:
        model, compute_dtype: as of `use_session`.
        options: of `Session`, but its groups.

    Raises:
        InputError: as `use_session`, and of the options.
    """
    place = _place(next(iter(moe_blocks(model).values())).experts, "the first experts")
    ranks, world = place.ep_mesh.size(), dist.get_world_size()
    session = Session(num_experts=num_experts(model.config), **({"groups": world // ranks} | options))
    use_session(model, session, compute_dtype=compute_dtype)
    return session


def use_session(model: Any, session: Session, *, compute_dtype: torch.dtype | None = None) -> None:
    """Run the experts of a loaded model in a session, with routing replay. Before this call they run as "all_to_all".

    Gradients, clipping, optimizer and checkpoints remain those of FSDP2; `session.finish_gradients()` must be called
    before every optimizer step. If ranks have the same experts, or compute in another dtype than that of the
    parameters, each has a copy of its own in the compute dtype (`session.memory().staging_bytes`), which is gathered at
    the first micro-step after weights have changed. Collective over all ranks.

    With tensor parallelism the ranks of a batch each dispatch the rows that `rows_of_rank` gives; plan these.

    Args:
        model: from `from_pretrained`, with a `DistributedConfig` of `ep_implementation="trimtab"`.
        compute_dtype: of expert compute, if the model runs under autocast.
        session: without layers; its expert-parallel groups are those of the model.

    Raises:
        InputError: if the model's type is not supported, or model and session don't match. The model is then unchanged.
    """
    blocks = moe_blocks(model)
    if session.layers or session.optimizers:
        raise InputError(
            f"the session has {len(session.layers)} layers and {len(session.optimizers)} optimizers already; give the "
            "model a new session, and train it as FSDP2 does"
        )
    for index, block in blocks.items():
        _check_place(block.experts, f"the experts of decoder layer {index}", session)
        check_experts(block.experts, index, session.num_experts)
    config = model.config.distributed_config
    if config.fsdp_cpu_offload:
        raise InputError("the experts are offloaded to the CPU between uses; load the model without fsdp_cpu_offload")
    session.auxiliary_loss = partial(auxiliary_loss, model.config)
    for block in blocks.values():
        experts = block.experts
        layer = add_fsdp_layer(
            session, experts, expert_tensors(experts), expert_products(experts),
            compute_dtype=torch.bfloat16 if config.fsdp_mixed_precision else compute_dtype,
        )  # fmt: skip
        experts.ep_implementation.follow(router_of(block), layer, model.config)


def rows_of_rank(model: Any, rows: int) -> slice:
    """Which of a batch's rows this rank dispatches: all, or its part if ranks of a tensor-parallel group share them."""
    mesh = next(iter(moe_blocks(model).values())).experts.ep_implementation.tp_mesh
    if mesh.size() == 1:
        return slice(0, rows)
    # As DTensor chunks them.
    part = -(-rows // mesh.size())
    start = min(rows, mesh.get_local_rank() * part)
    return slice(start, min(rows, start + part))


class SessionExperts(AllToAllEP):
    """Runs the experts of one MoE layer: in the session once there is one, before that by transformers' all-to-all."""

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.layer: ExpertLayer | None = None
        experts.ep_implementation = self  # type: ignore[assignment]

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        run = super().__call__ if self.layer is None else self.layer if self.tp_mesh.size() == 1 else self._run_part
        output: torch.Tensor = run(hidden_states, top_k_index, top_k_weights)
        return output

    def follow(self, router: nn.Module, layer: ExpertLayer, config: Any) -> None:
        """Run the experts in the layer from now on, with the router's weights for the ids that the session replays."""
        self.layer = layer
        if self.tp_mesh.size() == 1:
            follow_layer(router, layer, config)
        else:
            choose_experts(router, config, self._route_part)

    # The ranks of a tensor-parallel group share a batch. Each dispatches its part of the rows, as "all_to_all" does.

    def _route_part(self, live_ids: torch.Tensor) -> torch.Tensor:
        assert self.layer is not None
        self._ids = self.layer.route(self._part(live_ids))
        return self._whole(self._ids, live_ids) if self.layer.replays else live_ids

    def _run_part(self, hidden: torch.Tensor, _ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert self.layer is not None
        return self._whole(self.layer(self._part(hidden), self._ids, self._part(weights)), hidden)

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        replicated = DTensor.from_local(whole, self.tp_mesh, [Replicate()], run_check=False)
        part: torch.Tensor = replicated.redistribute(self.tp_mesh, [Shard(0)]).to_local()
        return part

    def _whole(self, part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        split = DTensor.from_local(
            part.contiguous(), self.tp_mesh, [Shard(0)], shape=like.shape, stride=like.contiguous().stride()
        )
        whole: torch.Tensor = split.full_tensor()
        return whole


def _place(experts: nn.Module, where: str) -> SessionExperts:
    implementation = getattr(experts, "ep_implementation", None)
    if not isinstance(implementation, SessionExperts):
        raise InputError(
            f"{where} are not run by {NAME!r}; load the model with "
            f"DistributedConfig(fsdp_size=N, ep_size=E, ep_implementation={NAME!r})"
        )
    return implementation


def _check_place(experts: nn.Module, where: str, session: Session) -> None:
    implementation = _place(experts, where)
    if implementation.layer is not None:
        raise InputError(f"{where} are in another session already; a model can be in one")
    ranks = dist.get_process_group_ranks(implementation.ep_mesh.get_group())
    if session.topology.ranks_by_position != ranks:
        raise InputError(f"{where} are spread over ranks {ranks}; the session should have these in one group")
    if session.topology.groups * session.topology.num_ranks != dist.get_world_size():
        raise InputError(f"the session has {session.topology.groups} expert-parallel groups; give it all of the model")
