"""`GradientReturns`: transfers of replica gradients to home ranks, during the backward of the layers below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from trimtab.runtime.autograd.gradient_watch import has_hooks
from trimtab.runtime.autograd.torch_engine import will_run
from trimtab.runtime.program.device_kernels import add_arrivals, ordered_sum
from trimtab.runtime.program.physical_experts import InstanceReplicas, Replica
from trimtab.runtime.ranks.topology import Topology
from trimtab.runtime.state.home_experts import HomeExperts, parameters_of
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.message_rounds import Message, post

ReplicaGradients = torch.Tensor | Sequence[torch.Tensor | None] | None
"""Gradients of one tensor of this rank's replicas: `[count, ...]`, or one for each; None where nothing used it."""


@dataclass(eq=False)
class _Return:
    """The gradients of one instance in transfer.

    Attributes:
        targets: for each trained tensor the Parameters whose `.grad` they are added to: one for a stack, one for each
            home row for a list; None for Parameters whose gradients the backward does not accumulate.
        arriving: home row and flat gradients, one for each trained tensor, of each replica of this rank's experts.
        shapes: of the gradients.
        memory: that of these gradients.
        sent: what this rank sends.
        works: the messages.
    """

    layer: HomeExperts
    targets: list[list[torch.nn.Parameter | None]]
    arriving: Sequence[tuple[int, Sequence[torch.Tensor]]]
    shapes: Sequence[torch.Size]
    memory: torch.Tensor
    sent: list[torch.Tensor]
    works: list[dist.Work] = field(default_factory=list)


class GradientReturns:
    """Sends gradients to home ranks in at least float32, in one message to each, and adds them there in plan order.

    At most `layers` instances are in transfer: before another one starts, the oldest is waited for and added. All are
    added when a backward ends. Memory therefore does not grow with depth, gradients are added at the same points in
    every run, and `.grad` is complete between backwards.
    """

    def __init__(self, topology: Topology, *, layers: int, counters: Counters) -> None:
        self._topology = topology
        self._layers = layers
        self._counters = counters
        self._in_transfer: list[_Return] = []
        self._spare: list[torch.Tensor] = []
        self._outgoing: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of memory for gradients of replicas on this rank that arrive, or that products add up."""
        used = [pending.memory for pending in self._in_transfer]
        return sum(tensor.nbytes for tensor in (*used, *self._spare, *self._outgoing.values()))

    def reserve(self, layer: HomeExperts, arriving: int) -> None:
        """Allocate memory for up to `arriving` replicas of this rank's experts in an instance, between transfers."""
        self._spare = []
        if arriving:
            self._spare = [self._take_memory(layer, arriving) for _ in range(self._layers)]

    def start(
        self,
        layer: HomeExperts,
        gradients: Sequence[ReplicaGradients],
        replicas: InstanceReplicas,
        tag: int,
    ) -> None:
        """Start sending an instance's replica gradients to their home ranks. Call it in a backward.

        Args:
            gradients: gradients of this rank's replicas for each tensor.
            tag: tag of the messages.

        Raises:
            RuntimeError: if the backward is `torch.autograd.grad`, or an expert tensor has a hook on its gradient.
        """
        if len(self._in_transfer) == self._layers:
            self._add(self._in_transfer.pop(0))
        form, rank, located = layer.trained_form, self._topology.rank, replicas.located(layer.places)
        targets: list[list[torch.nn.Parameter | None]] = []
        if not layer.joins_in_backward:
            tensors = layer.tensors
            targets = [[p if accumulates(layer, p) else None for p in parameters_of(tensors[t])] for t in form.numbers]
        # One message for each pair of ranks, with its replicas in plan order. No replica is at its home.
        pairs: dict[tuple[int, int], list[Replica]] = {}
        for replica in located:
            pairs.setdefault((replica.rank, replica.home), []).append(replica)
        arriving = [pair for pair in pairs if pair[1] == rank]
        memory = self._take_memory(layer, sum(len(pairs[pair]) for pair in arriving))
        rows: dict[Replica, torch.Tensor] = {}
        sent: list[torch.Tensor] = []
        messages, start = [], 0
        for pair, of_pair in pairs.items():
            tensor = None
            if pair[1] == rank:
                tensor = memory[start : start + len(of_pair)]
                rows |= dict(zip(of_pair, tensor.unbind(), strict=True))
                start += len(of_pair)
            elif pair[0] == rank:
                own = [self._own(layer, t, gradients[t], each.slot) for each in of_pair for t in form.numbers]
                tensor = torch.cat([gradient.reshape(-1) for gradient in own]).to(memory.dtype)
                self._counters.gradient_bytes += tensor.nbytes
                sent.append(tensor)
            messages.append(Message(*pair, tensor))
        split = [(each.row, rows[each].split(form.sizes)) for each in located if each.home == rank]
        works = [work for _, work in post(messages, rank, self._topology.gradients, tag=tag)]
        self._in_transfer.append(_Return(layer, targets, split, form.shapes, memory, sent, works))

    def memory(self, layer: HomeExperts, t: int, dtype: torch.dtype, slots: int) -> torch.Tensor:
        """Memory `[slots, ...]` for gradients of a tensor of this rank's replicas, which a product adds up itself.

        All layers share it, since a layer whose experts are the framework's waits for its returns before its backward
        ends.
        """
        key = layer.expert_shapes[t], dtype
        held = self._outgoing.get(key)
        if held is None or len(held) < slots:
            held = self._outgoing[key] = torch.empty(slots, *key[0], dtype=dtype, device=layer.device)
        return held[:slots]

    def finish(self) -> None:
        """Wait for all gradients in transfer, and add them."""
        while self._in_transfer:
            self._add(self._in_transfer.pop(0))

    def abandon(self) -> None:
        """Drop the gradients of a failed backward after their transfer. All ranks have started the same transfers."""
        abandoned, self._in_transfer = self._in_transfer, []
        for pending in abandoned:
            self._arrived(pending)

    def join(self, layer: HomeExperts, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Wait for the gradients of the last `start`, which must be of the same layer, and add them.

        Args:
            gradients: gradients of the home experts, `[E / R, ...]` for each stacked tensor; they are not changed.

        Returns:
            The sums, in the dtypes of `gradients`.
        """
        trained = layer.trained_form.numbers
        pending = self._take(layer)
        # Copies, since autograd may use the same tensors elsewhere.
        joined = [g.clone() if t in trained and pending.arriving else g for t, g in enumerate(gradients)]
        arrived = self._arrived(pending)
        targets = [joined[t][row] for row, _ in arrived for t in trained]
        add_arrivals(targets, [of_tensor for _, of_row in arrived for of_tensor in of_row])
        return joined

    def join_parameters(self, layer: HomeExperts, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Wait for the gradients of the last `start`, which must be of the same layer of lists, and add them to the
        parameters' `main_grad` where they have one.

        Args:
            parameters: trained ones, among them all for which gradients arrive.

        Returns:
            For each parameter the gradient that autograd has still to add, in its dtype; None if none arrived.
        """
        trained = layer.trained_form.numbers
        if not trained:
            return []
        pending = self._take(layer)
        added: dict[int, torch.Tensor] = {}
        targets: list[torch.Tensor] = []
        arrivals: list[list[torch.Tensor]] = []
        arrived = self._arrived(pending)
        if not arrived:
            return []
        tensors = [layer.current[t] for t in trained]
        for row, of_row in arrived:
            for of_layer, of_tensor in zip(tensors, of_row, strict=True):
                parameter = of_layer[row]
                main_grad = getattr(parameter, "main_grad", None)
                if main_grad is not None:
                    targets.append(main_grad)
                    arrivals.append(of_tensor)
                else:
                    added[id(parameter)] = ordered_sum(of_tensor).to(parameter.dtype, copy=True)
        add_arrivals(targets, arrivals)
        return [added.get(id(parameter)) for parameter in parameters]

    def _take(self, layer: HomeExperts) -> _Return:
        """The last `start`, which must be of this layer."""
        pending = self._in_transfer.pop()
        assert pending.layer is layer
        return pending

    def _take_memory(self, layer: HomeExperts, arriving: int) -> torch.Tensor:
        """Memory `[arriving, N]` for the trained tensors of experts, spare or new."""
        size, dtype = sum(layer.trained_form.sizes), layer.gradient_dtype
        for index, spare in enumerate(self._spare if arriving else ()):
            if spare.shape[0] >= arriving and spare.shape[1] == size and spare.dtype is dtype:
                return self._spare.pop(index)
        return torch.empty(arriving, size, dtype=dtype, device=layer.device)

    def _own(self, layer: HomeExperts, t: int, gradients: ReplicaGradients, slot: int) -> torch.Tensor:
        """The gradient of one replica; zeros if nothing used its tensor."""
        gradient = None if gradients is None else gradients[slot]
        if gradient is None:
            return torch.zeros(layer.expert_shapes[t], dtype=layer.gradient_dtype, device=layer.device)
        return gradient

    def _add(self, pending: _Return) -> None:
        targets: list[torch.Tensor] = []
        arrivals: list[list[torch.Tensor]] = []
        for row, of_row in self._arrived(pending):
            for parameters, of_tensor in zip(pending.targets, of_row, strict=True):
                # A stack is one Parameter for all rows.
                parameter = parameters[row % len(parameters)]
                if parameter is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                targets.append(parameter.grad if parameter.ndim == of_tensor[0].ndim else parameter.grad[row])
                arrivals.append(of_tensor)
        add_arrivals(targets, arrivals)

    def _arrived(self, pending: _Return) -> list[tuple[int, list[list[torch.Tensor]]]]:
        """Wait for gradients that arrive here. Returns home rows, each with its replicas' gradients of every trained
        tensor, in plan order. Their memory is spare; add them before another `start`."""
        if pending.works:
            self._counters.wait([work.wait for work in pending.works], pending.layer.device)
        of_rows: dict[int, list[Sequence[torch.Tensor]]] = {}
        for row, flat in pending.arriving:
            of_replica = [part.view(shape) for part, shape in zip(flat, pending.shapes, strict=True)]
            of_rows.setdefault(row, []).append(of_replica)
        if pending.memory.shape[0]:
            self._spare.append(pending.memory)
            if len(self._spare) > self._layers:
                # Live calls have more and more replicas at first.
                self._spare = sorted(self._spare, key=len)[1:]
        return [(row, [list(of_tensor) for of_tensor in zip(*of_row, strict=True)]) for row, of_row in of_rows.items()]


def accumulates(layer: HomeExperts, parameter: torch.nn.Parameter) -> bool:
    """Whether the running backward adds to a parameter's gradient; `backward(inputs=...)` may exclude it.

    Raises:
        RuntimeError: if `torch.autograd.grad` differentiates by it, or it has a hook on its gradient.
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    if has_hooks(parameter, node):
        raise RuntimeError(
            f"MoE layer {layer.index}: a hook on an expert tensor would get its gradient before those of replicas are "
            "added; remove the hook, or work on the gradients after backward()"
        )
    try:
        return will_run(node)
    except RuntimeError:
        raise RuntimeError(
            f"MoE layer {layer.index}: torch.autograd.grad() would miss the gradients of replicas, which are added to "
            "`.grad`; call backward()"
        ) from None
