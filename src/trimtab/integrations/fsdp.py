"""Experts that FSDP2 owns, in a `Session`, whatever the framework.

FSDP keeps parameters, gradients, optimizer state and checkpoints. The session computes with what FSDP puts into the
module while it runs, so gradients of replicas are joined to those of the home experts before FSDP reduces them.
Replicas are sent from this rank's experts: from FSDP's own memory if a rank has them whole and in the compute dtype or
has them cast by the session; else from copies, which FSDP's all-gather fills each time that weights have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trimtab.errors import InputError
from trimtab.runtime import ExpertLayer, Session
from trimtab.runtime.program.grouped_products import ApplyExperts


def add_fsdp_layer(
    session: Session, module: Any, names: Sequence[str], apply: ApplyExperts, *, owner: Any = None,
    compute_dtype: torch.dtype | None = None,
) -> ExpertLayer:  # fmt: skip
    """Add the next MoE layer, whose experts FSDP2 shards over the ranks that have the same ones. Collective over all
    data ranks.

    Call the layer within the owner's forward, as `module.forward = layer` does, so that FSDP has gathered the weights.

    Args:
        session: its expert-parallel groups are those of the experts, its data ranks those of FSDP.
        module: has the parameters, each a stack of this expert-parallel rank's experts `[E / R, ...]`: a parameter that
            FSDP shards in any dimension, and which may be a DTensor over the expert-parallel group.
        names: of the parameters, in the order that `apply` takes them.
        apply: see `Session.add_layer`.
        owner: the module that was given to `fully_shard`, if it is another one, such as the decoder layer.
        compute_dtype: that of FSDP's mixed precision; the parameters' by default.

    Raises:
        InputError: as `Session.add_layer`.
    """
    # Shards may be whole on one rank and empty on the next.
    whole = torch.tensor(_are_whole(session, module, names))
    dist.all_reduce(whole, dist.ReduceOp.MIN, group=session.topology.control)
    shape = None if whole else (len(session.home_experts), compute_dtype)
    held = _Held(module, names, owner or module, shape)
    return session.add_layer(
        held.read, apply, weights=held.weights, refresh=None if whole else held.gather,
        compute_dtype=compute_dtype if whole else None,
    )  # fmt: skip


class _Held:
    """This rank's experts of a module: parameters in FSDP's memory, or copies of what FSDP gathers.

    Args:
        owner: the module that FSDP shards.
        copies: number of experts and dtype, None for the parameters'; or None for parameters in FSDP's memory.
    """

    def __init__(
        self, module: nn.Module, names: Sequence[str], owner: Any, copies: tuple[int, torch.dtype | None] | None
    ) -> None:
        self._module, self._names, self._owner = module, names, owner
        self._sharded: list[torch.Tensor] = [getattr(module, name) for name in names]
        self._versions: list[int] = []
        self._in_place = copies is None
        self._experts = []
        for parameter in self._sharded:
            mine = _local(parameter.detach())
            if copies is not None:
                count, dtype = copies
                mine = torch.empty(count, *parameter.shape[1:], dtype=dtype or mine.dtype, device=mine.device)
            self._experts.append(nn.Parameter(mine, parameter.requires_grad))

    def read(self) -> Sequence[nn.Parameter]:
        """The experts, marked as changed if FSDP's parameters are, whose writes show in their own versions alone."""
        for parameter, expert in zip(self._sharded, self._experts, strict=True):
            if self._in_place and expert.data_ptr() != (now := _local(parameter.detach())).data_ptr():
                expert.data = now
        versions = [each._version for each in self._sharded]
        if versions != self._versions:
            self._versions = versions
            torch.autograd.graph.increment_version(self._experts)
        return self._experts

    def weights(self) -> list[torch.Tensor]:
        """What FSDP puts into the module while it runs, in the graph. Experts get its `requires_grad`."""
        weights = [_local(getattr(self._module, name)) for name in self._names]
        if torch.is_grad_enabled():
            for expert, weight in zip(self._experts, weights, strict=True):
                expert.requires_grad_(weight.requires_grad)
        return weights

    @torch.no_grad()
    def gather(self) -> None:
        """Fill the copies by FSDP's own all-gather: shard dimension, padding, dtype and replicas are its business.
        Collective over the ranks with the same experts."""
        self._owner.unshard()
        for copy, weight in zip(self._experts, self.weights(), strict=True):
            copy.copy_(weight)
        self._owner.reshard()


def _are_whole(session: Session, module: nn.Module, names: Sequence[str]) -> bool:
    """Whether this rank's shards are its experts. Raises InputError if they are no experts of the session's."""
    num_local, whole = len(session.home_experts), True
    for name in names:
        parameter = getattr(module, name)
        if len(parameter) not in (session.num_experts, num_local):
            raise InputError(
                f"{type(module).__name__}.{name} has {len(parameter)} experts; the session has {session.num_experts} "
                f"on {session.topology.num_ranks} ranks"
            )
        whole = whole and _local(parameter.detach()).shape == (num_local, *parameter.shape[1:])
    return whole


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of this expert-parallel rank: a plain tensor, or the local part of a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    local: torch.Tensor = tensor.to_local()
    return local
