"""`RolloutWeights`: copies the trained weights to the model of the rollout."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn

from trimtab.errors import InputError
from trimtab.runtime import Session
from trimtab.runtime.state.flat_memory import carve, packed_bytes
from trimtab.runtime.transfer.mirror import share_memory


class RolloutWeights:
    """The weights of the rollout's model, which has all experts in logical order.

    On CPU ranks of one node the models of all ranks share one memory, if it is large enough, to which every rank copies
    its own experts. Else experts are gathered.

    Args:
        model: the trained model, with this rank's experts.
        rollout_model: the same model with all experts, perhaps in another dtype.
    """

    def __init__(self, model: nn.Module, rollout_model: nn.Module, session: Session) -> None:
        self._model, self._rollout_model, self._session = model, rollout_model, session
        topology, targets = session.topology, dict(rollout_model.named_parameters())
        devices = {parameter.device.type for parameter in (*model.parameters(), *targets.values())}
        self._shares = False
        if devices == {"cpu"} and topology.ranks_per_node == topology.num_ranks == dist.get_world_size():
            like = [(target.shape, target.dtype) for target in targets.values()]
            # On all ranks alike, if shared memory is too small.
            with suppress(InputError):
                shared = carve(share_memory(packed_bytes(like), topology), like)
                for target, memory in zip(targets.values(), shared, strict=True):
                    target.data = memory
                self._shares = True

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the present weights. Collective; no rank may use the rollout's model meanwhile."""
        if not self._shares:
            self._rollout_model.load_state_dict(self._session.logical_state_dict(self._model))
            return
        rows = {
            id(parameter): torch.from_numpy(layer.home_experts)
            for layer in self._session.homes
            for parameter in layer.parameters
        }
        targets, rank = dict(self._rollout_model.named_parameters()), self._session.topology.rank
        dist.barrier()
        for number, (name, parameter) in enumerate(self._model.named_parameters()):
            experts = rows.get(id(parameter))
            if experts is not None:
                targets[name][experts] = parameter.to(targets[name].dtype)
            elif number % dist.get_world_size() == rank:
                targets[name].copy_(parameter)
        buffers = dict(self._rollout_model.named_buffers())
        for name, buffer in self._model.named_buffers():
            buffers[name].copy_(buffer)
        dist.barrier()
