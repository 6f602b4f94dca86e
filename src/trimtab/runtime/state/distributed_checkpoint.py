"""Stacks of experts for `torch.distributed.checkpoint` (DCP): whole tensors `[E, ...]`, of which each rank has rows.

Import it where it is used: torch's modules take two seconds.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trimtab.array_type import Array
from trimtab.runtime.state.expert_places import ExpertPlaces


def whole_stack(rows: torch.Tensor, places: ExpertPlaces, rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole stack `[E, ...]` in logical order, which has this rank's `rows` `[H, ...]` as its memory: a DTensor,
    `Shard(0)` over the group, or `ExpertRows` while the order of rows and ranks is another one.

    Args:
        group: the ranks of `places`.
    """
    if not places.are_first:
        return ExpertRows(rows, places.experts_RH[rank], len(places.home_E))
    mesh = DeviceMesh.from_group(group, rows.device.type)
    shape = torch.Size([len(places.home_E), *rows.shape[1:]])
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=rows.stride())


class ExpertRows(torch.Tensor):
    """A stack `[E, ...]` of which this rank has rows in any order. DCP saves it and loads it in place; all else raises.

    Args:
        rows: `[H, ...]`.
        experts_H: their logical ids.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, rows: torch.Tensor, experts_H: Array, num_experts: int) -> ExpertRows:
        shape = num_experts, *rows.shape[1:]
        whole: ExpertRows = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype, device=rows.device)  # type: ignore[attr-defined]
        zeros = [0] * (rows.ndim - 1)
        whole._rows = {torch.Size([e, *zeros]): row[None] for e, row in zip(experts_H.tolist(), rows, strict=True)}
        return whole

    _rows: dict[torch.Size, torch.Tensor]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ExpertRows({[offsets[0] for offsets in self._rows]} of {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> NoReturn:
        raise RuntimeError(
            f"experts have moved, so this rank has rows of a stack in another order than a DTensor could: {operation} "
            "is not possible, only torch.distributed.checkpoint.save and load; see session.logical_state_dict(model)"
        )

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets), WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(row), self.shape),
            )
            for chunk, row in zip(self.__create_chunk_list__(), self._rows.values(), strict=True)
        ]  # fmt: skip

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, row.shape) for offsets, row in self._rows.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._rows[index.offset]
