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
    experts = _Whole if whole else _Gathered
    held = experts(module, names, owner or module, len(session.home_experts), compute_dtype)
    return session.add_layer(
        held.read, apply, weights=held.weights, refresh=getattr(held, "gather", None),
        compute_dtype=compute_dtype if isinstance(held, _Whole) else None,
    )  # fmt: skip


class _Held:
    """The parameters of a module, and the tensors that FSDP puts in their place while the module runs."""

    def __init__(
        self, module: nn.Module, names: Sequence[str], owner: Any, num_local: int, dtype: torch.dtype | None
    ) -> None:
        self._module, self._names, self._owner = module, names, owner
        self._sharded: list[torch.Tensor] = [getattr(module, name) for name in names]
        self._versions: list[int] = []
        self._experts = self._made(num_local, dtype)

    def _made(self, num_local: int, dtype: torch.dtype | None) -> list[nn.Parameter]:
        raise NotImplementedError

    def _mark_changed(self) -> None:
        """Mark the experts as changed if FSDP's parameters are, whose writes show in their own versions alone."""
        versions = [each._version for each in self._sharded]
        if versions != self._versions:
            self._versions = versions
            torch.autograd.graph.increment_version(self._experts)

    def weights(self) -> list[torch.Tensor]:
        """What FSDP puts into the module while it runs, in the graph. Experts get its `requires_grad`."""
        weights = [_local(getattr(self._module, name)) for name in self._names]
        if torch.is_grad_enabled():
            for expert, weight in zip(self._experts, weights, strict=True):
                expert.requires_grad_(weight.requires_grad)
        return weights


class _Whole(_Held):
    """Experts that this rank has whole: parameters in FSDP's memory."""

    def _made(self, num_local: int, dtype: torch.dtype | None) -> list[nn.Parameter]:
        return [nn.Parameter(_local(each.detach()), each.requires_grad) for each in self._sharded]

    def read(self) -> Sequence[nn.Parameter]:
        """The experts, in the memory that FSDP uses now."""
        for parameter, expert in zip(self._sharded, self._experts, strict=True):
            now = _local(parameter.detach())
            if expert.data_ptr() != now.data_ptr():
                expert.data = now
        self._mark_changed()
        return self._experts


class _Gathered(_Held):
    """Experts of which this rank has shards: copies in the compute dtype."""

    def _made(self, num_local: int, dtype: torch.dtype | None) -> list[nn.Parameter]:
        copies = []
        for parameter in self._sharded:
            part = _local(parameter.detach())
            whole = torch.empty(num_local, *parameter.shape[1:], dtype=dtype or part.dtype, device=part.device)
            copies.append(nn.Parameter(whole, parameter.requires_grad))
        return copies

    def read(self) -> Sequence[nn.Parameter]:
        """The copies, which are marked as changed when the shards are."""
        self._mark_changed()
        return self._experts

    @torch.no_grad()
    def gather(self) -> None:
        """Fill the copies by FSDP's own all-gather: shard dimension, padding, dtype and replicas are its business.
        Collective over the ranks with the same experts."""
        self._owner.unshard()
        for copy, weight in zip(self._experts, self.weights(), strict=True):
            copy.copy_(weight)
        self._owner.reshard()
        self.read()


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
