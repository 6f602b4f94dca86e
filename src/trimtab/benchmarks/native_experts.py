"""transformers' own expert parallelism with given routing, to compare the runtime with."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import AllToAllEP

from trimtab.integrations.transformers import moe_blocks
from trimtab.integrations.transformers.families import reroute
from trimtab.runtime import Session


def use_native_experts(model: Any, session: Session, ids_LNK: torch.Tensor) -> list[nn.Parameter]:
    """Run a whole model's experts through `AllToAllEP`, with the session's home experts and given routing.

    Args:
        model: a whole model of the session's sizes.
        session: whose home experts this rank keeps.
        ids_LNK: `[L, n, K]` int64, the experts of this rank's tokens.

    Returns:
        The replicated parameters: all but those of experts.
    """
    mesh = init_device_mesh("cpu", (session.num_ranks, 1), mesh_dim_names=("ep", "tp"))
    home = torch.from_numpy(session.home_experts)
    of_experts: set[nn.Parameter] = set()
    for layer, block in enumerate(moe_blocks(model).values()):
        experts: Any = block.experts
        experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach()[home].clone())
        experts.down_proj = nn.Parameter(experts.down_proj.detach()[home].clone())
        # As after transformers' own sharding of parameters: only local experts are left.
        experts.num_experts = len(home)
        experts._is_expert_parallel = True
        experts.forward = AllToAllEP(experts, mesh["ep"], mesh["tp"])
        block.gate.register_forward_hook(partial(_use_routing, model.config, ids_LNK[layer]))
        of_experts.update(experts.parameters())
    return [parameter for parameter in model.parameters() if parameter not in of_experts]


def _use_routing(config: Any, ids_NK: torch.Tensor, _gate: nn.Module, _args: Any, output: Any) -> Any:
    return reroute(config, output, ids_NK)
