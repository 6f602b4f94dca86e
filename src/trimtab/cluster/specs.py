"""`ClusterSpec` and `ModelSpec`: the few sizes of a cluster and a model that a plan depends on."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from trimtab.errors import InputError

# Bytes a second; below, a rate was meant in another unit.
SLOWEST_LINK = 1e6


@dataclass(frozen=True)
class ClusterSpec:
    """The ranks of one expert-parallel group.

    Attributes:
        ranks: ranks in the group, R.
        ranks_per_node: neighbouring ranks that share a node.
        slots_per_rank: replicas that a rank has room for in every MoE layer.
        expert_flops: operations a second of a rank's grouped matrix products; half of the 8e14 that one H100 reaches in
            bf16 on large square matrices.
        node_bytes_per_s: a rank's link inside its node, each way (NVLink 4).
        network_bytes_per_s: a rank's link between nodes, each way (400 Gb/s).
        host_bytes_per_s: a rank's link from its node's host memory (PCIe 5 x16).
        mirror_experts: experts, each of one layer, that the mirror in a node's host memory has room for; None for all.

    A link of 0 bytes a second brings no weights. With none from host memory, all come from rank to rank.

    Raises:
        InputError: if the nodes don't divide the ranks, a link or a size can't be, or weights have no way to a replica.
    """

    ranks: int
    ranks_per_node: int
    slots_per_rank: int = 2
    expert_flops: float = 4e14
    node_bytes_per_s: float = 450e9
    network_bytes_per_s: float = 50e9
    host_bytes_per_s: float = 55e9
    mirror_experts: int | None = None

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1 or self.ranks % self.ranks_per_node:
            raise InputError(
                f"{self.ranks} ranks with {self.ranks_per_node} a node don't make whole nodes; "
                "ranks per node should divide the ranks"
            )
        if self.slots_per_rank < 0:
            raise InputError(f"slots per rank is {self.slots_per_rank}; it should be 0 or more")
        for name in ("node_bytes_per_s", "network_bytes_per_s", "host_bytes_per_s"):
            rate = getattr(self, name)
            if rate != 0 and not SLOWEST_LINK <= rate < math.inf:
                raise InputError(f"{name} is {rate}; it should be {SLOWEST_LINK:,.0f} or more, or 0 for none")
        if self.mirror_experts is not None and self.mirror_experts < 0:
            raise InputError(f"mirror_experts is {self.mirror_experts}; it should be 0 or more, or None for all")
        if (not self.host_bytes_per_s or self.mirror_experts is not None) and not (
            self.node_bytes_per_s and self.network_bytes_per_s
        ):
            raise InputError(
                f"some replicas have no path: node_bytes_per_s is {self.node_bytes_per_s:g}, network_bytes_per_s "
                f"{self.network_bytes_per_s:g}, host_bytes_per_s {self.host_bytes_per_s:g}, mirror_experts "
                f"{self.mirror_experts}; the first two should be above 0, or the third with mirror_experts None"
            )


@dataclass(frozen=True)
class ModelSpec:
    """The MoE part of a model, as its Hugging Face `config.json` describes it.

    Attributes:
        name: `model_type` of the config.
        num_experts: routed experts of a layer, E.
        top_k: experts that a token uses.
        hidden_size: width of a token.
        expert_width: inner width of an expert.
        weight_bytes: bytes of one weight, 2 for bf16.
    """

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    expert_width: int
    weight_bytes: int = 2

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert in one layer: gate, up and down projections."""
        return 3 * self.hidden_size * self.expert_width

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights in one layer."""
        return self.expert_parameters * self.weight_bytes

    @classmethod
    def from_config(cls, path: str | os.PathLike[str]) -> ModelSpec:
        """Read a `config.json`, or the one in a checkpoint directory.

        Raises:
            InputError: if there is none, or it does not describe a MoE model.
        """
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        if not file.is_file():
            raise InputError(f"{file}: no such file; expected a Hugging Face config.json or a checkpoint directory")
        try:
            config = json.loads(file.read_text())
        except (ValueError, OSError) as error:
            raise InputError(f"{file}: not a readable JSON file ({error})") from None
        if not isinstance(config, dict):
            raise InputError(f"{file}: expected a JSON object with the model's config")
        values: dict[str, int] = {}
        for field, keys in _CONFIG_KEYS.items():
            found = [config[key] for key in keys if isinstance(config.get(key), int)]
            if not found:
                raise InputError(f"{file}: not the config of a MoE model; it should have {' or '.join(keys)}")
            values[field] = found[0]
        return cls(name=str(config.get("model_type", file.parent.name)), **values)


QWEN3_30B = ModelSpec("qwen3-30b-a3b", num_experts=128, top_k=8, hidden_size=2048, expert_width=768)

_CONFIG_KEYS = {
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token"),
    "hidden_size": ("hidden_size",),
    "expert_width": ("moe_intermediate_size", "intermediate_size"),
}
