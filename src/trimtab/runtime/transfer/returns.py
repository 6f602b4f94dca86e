"""`GradientReturns`: replica gradients on their way home, beside the backward of the layers below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trimtab.runtime.autograd.torch_engine import will_run
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.rows.instance_replicas import InstanceReplicas
from trimtab.runtime.state.home_experts import ExpertTensor, HomeExperts
from trimtab.runtime.transfer.counters import Counters


@dataclass(eq=False)
class _Return:
    """One instance's gradients under way: those that arrive here, by home row, and those that leave.

    Attributes:
        added: for each trained tensor the Parameter to whose gradient they are added, or a list of them by home row;
            None for those whose gradients the backward leaves out.
    """

    layer: HomeExperts
    added: list[torch.nn.Parameter | list[torch.nn.Parameter | None] | None]
    rows: list[int]
    buffers: list[list[torch.Tensor]]
    leaving: list[torch.Tensor]
    works: list[dist.Work]


class GradientReturns:
    """Sends gradients home in at least float32, and adds them there in plan order.

    At most `layers` instances are under way: when another one comes, the oldest is waited for and added. All are added
    when a backward ends. So memory does not grow with depth, gradients are added at the same points in every run, and
    `.grad` is complete between backwards.
    """

    def __init__(self, topology: Topology, *, layers: int, counters: Counters) -> None:
        self._topology = topology
        self._layers = layers
        self._counters = counters
        self._under_way: list[_Return] = []
        self._spare: list[list[torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Memory that this rank keeps for arriving gradients."""
        used = [buffers for pending in self._under_way for buffers in pending.buffers]
        return sum(tensor.nbytes for buffers in used + self._spare for tensor in buffers)

    def reserve(self, layer: HomeExperts, arriving: int) -> None:
        """Have buffers for instances with up to `arriving` replicas of this rank's experts. Nothing is under way."""
        trained = _trained(layer)
        self._spare = [self._buffers(layer, trained) for _ in range(arriving * self._layers)]

    def start(
        self,
        layer: HomeExperts,
        gradients: Sequence[torch.Tensor | None],
        replicas: InstanceReplicas,
        tag: int,
    ) -> None:
        """Start sending an instance's replica gradients home. Called in a backward.

        Args:
            gradients: of this rank's replicas, `[count, ...]` for each tensor; None where it is frozen.
            tag: of the messages.

        Raises:
            RuntimeError: if the backward is `torch.autograd.grad`, or an expert tensor has a hook on its gradient.
        """
        if len(self._under_way) == self._layers:
            self._add(self._under_way.pop(0))
        trained = _trained(layer)
        tensors = layer.tensors
        added = [None if layer.joins_in_backward else _accumulated(layer, tensors[t]) for t in trained]
        pending = _Return(layer, added, [], [], [], [])
        operations: list[dist.P2POp] = []
        group, rank = self._topology.gradients, self._topology.rank
        for p in range(replicas.count):
            expert, to = int(replicas.experts[p]), int(replicas.ranks[p])
            home = int(layer.home_E[expert])
            if home == rank:
                buffers = self._buffers(layer, trained)
                pending.rows.append(int(layer.rows_E[expert]))
                pending.buffers.append(buffers)
                if to == rank:
                    for buffer, t in zip(buffers, trained, strict=True):
                        buffer.copy_(_given(gradients[t])[int(replicas.slots[p])])
                    continue
                operations += [
                    dist.P2POp(dist.irecv, buffer, group=group, group_peer=to, tag=tag) for buffer in buffers
                ]
            elif to == rank:
                for t in trained:
                    row = _given(gradients[t])[int(replicas.slots[p])]
                    pending.leaving.append(row.to(accumulation_dtype(row.dtype)).contiguous())
                    operations.append(
                        dist.P2POp(dist.isend, pending.leaving[-1], group=group, group_peer=home, tag=tag)
                    )
                    self._counters.gradient_bytes += pending.leaving[-1].nbytes
        pending.works = dist.batch_isend_irecv(operations) if operations else []
        self._under_way.append(pending)

    def finish(self) -> None:
        """Wait for all gradients under way, and add them."""
        while self._under_way:
            self._add(self._under_way.pop(0))

    def abandon(self) -> None:
        """Drop what a backward that failed has left under way. All ranks have started the same."""
        left, self._under_way = self._under_way, []
        for pending in left:
            self._wait(pending)
            self._spare += pending.buffers

    def join(self, layer: HomeExperts, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Wait for the gradients that `start` sent on their way last, of the same layer, and add them.

        Args:
            gradients: of the home experts, `[E / R, ...]` for each stacked tensor; they stay as they are.

        Returns:
            The sums, in the dtypes of `gradients`.
        """
        pending = self._under_way.pop()
        assert pending.layer is layer
        trained = _trained(layer)
        # Copies, since autograd may have handed the same tensor to others.
        joined = [g.clone() if t in trained and pending.rows else g for t, g in enumerate(gradients)]
        for row, totals in self._arrived(pending):
            for t, total in zip(trained, totals, strict=True):
                joined[t][row] += total
        return joined

    def _buffers(self, layer: HomeExperts, trained: Sequence[int]) -> list[torch.Tensor]:
        """For the gradients of one expert's trained tensors."""
        like = [(layer.expert_shapes[t], accumulation_dtype(layer.likes[t][1])) for t in trained]
        for index, buffers in enumerate(self._spare):
            if [(buffer.shape, buffer.dtype) for buffer in buffers] == like:
                return self._spare.pop(index)
        return [torch.empty(shape, dtype=dtype, device=layer.device) for shape, dtype in like]

    def _wait(self, pending: _Return) -> None:
        if pending.works:
            self._counters.wait([work.wait for work in pending.works], pending.layer.device)

    def _add(self, pending: _Return) -> None:
        for row, totals in self._arrived(pending):
            for added, total in zip(pending.added, totals, strict=True):
                parameter = added[row] if isinstance(added, list) else added
                if parameter is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradient = parameter.grad if isinstance(added, list) else parameter.grad[row]
                gradient += total

    def _arrived(self, pending: _Return) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Wait for what arrives here. Gives rows of home experts, and the sum of the gradients of each one's replicas
        for every trained tensor."""
        self._wait(pending)
        for place, row in enumerate(pending.rows):
            if row in pending.rows[:place]:
                continue
            first, *others = (b for b, other in zip(pending.buffers, pending.rows, strict=True) if other == row)
            for buffers in others:
                for total, buffer in zip(first, buffers, strict=True):
                    total += buffer
            yield row, first
        self._spare += pending.buffers


def _given(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient


def _trained(layer: HomeExperts) -> list[int]:
    """Numbers of the tensors that are not frozen."""
    return [t for t, is_trained in enumerate(layer.are_trained) if is_trained]


def _accumulated(
    layer: HomeExperts, tensor: ExpertTensor
) -> torch.nn.Parameter | list[torch.nn.Parameter | None] | None:
    """The tensor's Parameters, None in place of those whose gradients the running backward leaves out."""
    if isinstance(tensor, torch.Tensor):
        return tensor if accumulates(layer, tensor) else None
    return [parameter if accumulates(layer, parameter) else None for parameter in tensor]


def accumulates(layer: HomeExperts, parameter: torch.nn.Parameter) -> bool:
    """Whether the running backward adds to a parameter's gradient; `backward(inputs=...)` may exclude it.

    Raises:
        RuntimeError: if the backward is `torch.autograd.grad` of it, or it has a hook on its gradient.
    """
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise RuntimeError(
            f"MoE layer {layer.index}: a hook on an expert tensor would get its gradient before those of replicas are "
            "added; remove the hook, or work on the gradients after backward()"
        )
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return will_run(node)
    except RuntimeError:
        raise RuntimeError(
            f"MoE layer {layer.index}: torch.autograd.grad() would miss the gradients of replicas, which are added to "
            "`.grad`; call backward()"
        ) from None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What gradients are sent and added in."""
    return torch.float64 if dtype is torch.float64 else torch.float32
