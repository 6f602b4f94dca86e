"""State dicts that were saved while experts were on other ranks, when they still moved: rows in the order of now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trimtab.errors import InputError
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts, parameters_of
from trimtab.runtime.state.owners import IDS, names_of


def state_in_order(
    holder: nn.Module | torch.optim.Optimizer, state: dict[str, Any], layers: Sequence[HomeExperts], topology: Topology
) -> dict[str, Any]:
    """See `Session.state_in_order`."""
    # Everything as the tensors of Parameters, by name or number.
    if isinstance(holder, nn.Module):
        keys: dict[int, list[Any]] = dict(names_of(holder))
        values = {name: {"": value} for name, value in state.items() if not name.endswith("." + IDS)}
        ids = {name.removesuffix("." + IDS): value for name, value in state.items() if name.endswith("." + IDS)}
    else:
        keys = {id(p): [n] for n, p in enumerate(p for group in holder.param_groups for p in group["params"])}
        values = {number: dict(of_one) for number, of_one in state["state"].items()}
        ids = {number: each for group in state["param_groups"] for number, each in group.get(IDS, {}).items()}
    for layer in layers:
        for tensor in layer.tensors:
            every = [keys[id(parameter)] for parameter in parameters_of(tensor) if id(parameter) in keys]
            names = [some[0] for some in every]
            if not names or names[0] not in ids:
                continue
            experts_RH = ids[names[0]].cpu()
            if experts_RH.shape != layer.places.experts_RH.shape:
                raise InputError(f"{names[0]!r} was saved with experts on {len(experts_RH)} ranks, not on these")
            rows = experts_RH.flatten().argsort()[torch.from_numpy(layer.home_experts)]
            of_first = values.get(names[0], {})
            for entry in sorted(key for key, value in of_first.items() if getattr(value, "ndim", 0)):
                is_stack = isinstance(tensor, torch.Tensor)
                own = of_first[entry] if is_stack else torch.stack([values[name][entry] for name in names])
                # As bytes, since backends do not support all dtypes.
                data = own.to(layer.device).reshape(len(own), -1).contiguous().view(torch.uint8)
                parts = [torch.empty_like(data) for _ in experts_RH]
                dist.all_gather(parts, data, group=topology.experts)
                own = torch.cat(parts)[rows.to(data.device)].view(own.dtype).view(own.shape).to(own.device)
                for some, value in zip(every, [own] if is_stack else own, strict=True):
                    for name in some:
                        values[name][entry] = value
    if isinstance(holder, nn.Module):
        return {name: value[""] for name, value in values.items()}
    groups = [{key: value for key, value in group.items() if key != IDS} for group in state["param_groups"]]
    return {**state, "state": values, "param_groups": groups}
