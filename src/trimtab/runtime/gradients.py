"""`SessionGradients`: the part of a `Session` that sums gradients over ranks, and clips them by one joint norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.weak import WeakIdKeyDictionary

from trimtab.errors import InputError
from trimtab.runtime.ranks.lockstep import CLIP, FINISH, digest
from trimtab.runtime.ranks.recorder import SUMMING
from trimtab.runtime.session_base import SessionBase
from trimtab.runtime.session_settings import SessionSettings
from trimtab.runtime.state.home_experts import HomeExperts
from trimtab.runtime.transfer import streams

# Gradients are summed in flat buckets of about this size.
BUCKET_BYTES = 64 << 20


class SessionGradients(SessionBase):
    """Sums and clipping of gradients before an optimizer step. Methods are collective over all data ranks."""

    def __init__(self, settings: SessionSettings) -> None:
        super().__init__(settings)
        self._elements: Elements = dict
        # Whether parameters that were not given to `finish_gradients` had equal elements on all ranks at first.
        self._equal: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()

    def finish_gradients(self, replicated: Iterable[torch.nn.Parameter] = ()) -> None:
        """Complete the gradients of all micro-steps since the last call; call it before clipping and optimizer steps.

        Gradients of experts are summed over expert-parallel groups, those of `replicated` parameters, which every rank
        has, over all ranks. Gradients of layers that were added with `weights` are not touched. A gradient that no rank
        has stays None.

        Raises:
            InputError: if `replicated` has experts of the session.
            RuntimeError: if it has summed these gradients already, and they were not zeroed since; within a backward.
            RanksDisagreeError: if the ranks made different calls before, or pass different parameters.
        """
        self._calls.require_outside_backward("finish_gradients")
        self._lockstep.need_groups()
        accumulation, topology = self._experts.accumulation, self.topology
        dense = dense_parameters(replicated, self._experts.parameters())
        experts = [parameter for parameter in self._experts.parameters() if parameter.requires_grad]
        summed = [*dense, *(experts if topology.expert_dp_group is not None else ())]
        same: dict[str, object] = {"replicated parameters": (len(dense), shapes_of(dense))}
        others = self._others(dense)
        equal = [*dense, *(parameter for parameter in others if self._equal.get(parameter))]
        elements = self._elements_to_compare(equal)
        # Before a change of the parameters they may be of others, where they are late.
        names = {key: self._names.get(parameter, "") for key, parameter in zip(elements, equal, strict=False)}
        are_new_D = self._lockstep.agree(
            FINISH, must_match=same | elements, values=[any(other not in self._equal for other in others)],
            problem=sparse_gradient(dense) or self._experts.optimizers.untrained() or accumulation.problem(summed),
            all_data_ranks=True, names=names,
        )  # fmt: skip
        if are_new_D.any():
            self._find_equal(others)
        with self.counters.recorded(SUMMING):
            self._experts.drain()
            zero_missing([*dense, *experts], topology.control)
            if topology.expert_dp_group is not None:
                sum_gradients(experts, topology.expert_dp_group)
            sum_gradients(dense, topology.data)
        accumulation.finish(summed)
        self._experts.optimizers.finish(dense, experts)
        self._experts.changed = True

    def _elements_to_compare(self, parameters: Sequence[torch.nn.Parameter]) -> dict[str, float]:
        """Of parameters that should be equal on all ranks. Where the device has streams they are those of the call
        before, for which the host does not wait."""
        before, self._elements = self._elements, read_elements(parameters)
        is_late = bool(parameters) and streams.has_streams(parameters[0].device)
        return before() if is_late else self._elements()

    def _others(self, dense: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """What the registered optimizers train beside experts and `dense`, but for distributed tensors."""
        known = {id(parameter) for parameter in (*dense, *self._experts.parameters())}
        trained = (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])
        return [p for p in trained if id(p) not in known and not hasattr(p, "to_local") and _has_memory(p)]

    def _find_equal(self, others: Sequence[torch.nn.Parameter]) -> None:
        """Find out which parameters have the same element on all ranks now, as frameworks' shards don't. Collective.

        Parameters of one value, as norms have at first, tell nothing.
        """
        mine = read_elements(others)()
        gathered: list[dict[str, float]] = [{}] * self.topology.num_data_ranks
        dist.all_gather_object(gathered, mine, group=self.topology.control)
        for key, parameter in zip(mine, others, strict=True):
            # As text, since NaN differs from NaN.
            is_equal = all(repr(of_rank.get(key)) == repr(mine[key]) for of_rank in gathered)
            self._equal[parameter] = is_equal and bool((parameter != parameter.reshape(-1)[0]).any())

    def clip_gradients(self, replicated: Iterable[torch.nn.Parameter], max_norm: float) -> float:
        """Clip the gradients of replicated parameters and of all ranks' experts by their joint norm, and return it.

        Raises:
            InputError: if a layer was added with `weights`, `replicated` has experts of the session, or the model has
                DTensors.
            RuntimeError: if `finish_gradients` was not called.
        """
        self._experts.need_own("clip their gradients")
        if self._has_dtensors:
            raise InputError(
                "clip_gradients() does not know the gradients of the model's DTensors (FSDP); clip by a norm of all "
                "gradients that you compute: of DTensors, of replicated parameters, and of the experts of all ranks"
            )
        experts = self._experts.parameters()
        dense = dense_parameters(replicated, experts)
        problem = RuntimeError("clip_gradients() needs complete gradients; call finish_gradients() first")
        self._lockstep.agree(
            CLIP, must_match={"max_norm": max_norm, "replicated parameters": len(dense)},
            problem=problem if self._experts.accumulation.is_open else None, all_data_ranks=True,
        )  # fmt: skip
        device = next((parameter.device for parameter in (*experts, *dense)), None)
        dense_square = _square_sum([p.grad for p in dense if p.grad is not None], device)
        expert_square = _square_sum(expert_gradients(self._experts.layers), device)
        dist.all_reduce(expert_square, group=self.topology.experts)
        norm = (dense_square + expert_square).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in (*dense, *experts):
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))
        return float(norm)


Elements = Callable[[], dict[str, float]]
"""One element of each of some parameters, by keys that are the same on all ranks. It waits for their copy to the
host."""


def read_elements(parameters: Sequence[torch.nn.Parameter]) -> Elements:
    """The elements in the middle of parameters, in their order; 0 for parameters that have no memory."""
    keys = [f"replicated parameter {n} {list(parameter.shape)}" for n, parameter in enumerate(parameters)]
    if not keys:
        return dict
    flats = [p.detach().reshape(-1) if _has_memory(p) else p.new_zeros(1) for p in parameters]
    middles = [flat[len(flat) // 2].to(flats[0].device, torch.float64) for flat in flats]
    read = streams.start_download(torch.stack(middles))
    return lambda: dict(zip(keys, read().tolist(), strict=True))


def _has_memory(parameter: torch.nn.Parameter) -> bool:
    return bool(parameter.numel() and parameter.untyped_storage().nbytes())


def shapes_of(parameters: Sequence[torch.nn.Parameter]) -> str:
    """A digest of the shapes and dtypes of parameters, in order."""
    return digest(np.frombuffer(repr([(tuple(p.shape), p.dtype) for p in parameters]).encode(), np.uint8))


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients of parameters over the ranks of a group, in place. Parameters without gradient are skipped.

    Args:
        group: all ranks by default.

    Raises:
        InputError: if a gradient is sparse.
    """
    parameters, bucket = list(parameters), list[torch.Tensor]()
    if problem := sparse_gradient(parameters):
        raise problem
    for parameter in parameters:
        if not parameter.requires_grad or parameter.grad is None:
            continue
        if bucket and (parameter.grad.dtype != bucket[0].dtype or sum(grad.nbytes for grad in bucket) > BUCKET_BYTES):
            _sum_bucket(bucket, group)
            bucket = []
        bucket.append(parameter.grad)
    if bucket:
        _sum_bucket(bucket, group)


def sparse_gradient(parameters: Iterable[torch.nn.Parameter]) -> InputError | None:
    """The error of a sparse gradient, or None."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            return InputError(
                f"the gradient of a parameter {list(parameter.shape)} is sparse, as with nn.Embedding(sparse=True); it "
                "can't be summed over ranks"
            )
    return None


def dense_parameters(
    replicated: Iterable[torch.nn.Parameter], experts: Iterable[torch.nn.Parameter]
) -> list[torch.nn.Parameter]:
    """The replicated parameters that are trained, without duplicates.

    Args:
        experts: the session's experts.

    Raises:
        InputError: if there are experts or distributed tensors among them.
    """
    ids = {id(parameter) for parameter in experts}
    trained = list({id(p): p for p in replicated if p.requires_grad}.values())
    if any(id(parameter) in ids for parameter in trained):
        raise InputError(
            "replicated parameters include experts of the session; use session.replicated_parameters(model)"
        )
    if any(hasattr(parameter, "to_local") for parameter in trained):
        raise InputError(
            "replicated parameters include DTensors, whose gradients their framework reduces; use "
            "session.replicated_parameters(model), which leaves them out"
        )
    return trained


def zero_missing(parameters: Sequence[torch.nn.Parameter], control: dist.ProcessGroup) -> None:
    """Set the gradients of parameters to zeros where only other ranks have one. Collective.

    Gradients that no rank has stay None, and optimizers skip them.

    Args:
        parameters: the same number on every rank.
        control: group of all ranks, for host tensors.
    """
    anywhere = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=control)
    for parameter, wanted in zip(parameters, anywhere.tolist(), strict=True):
        if wanted and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _sum_bucket(bucket: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    flat = _flatten_dense_tensors(bucket)
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
        gradient.copy_(total)


def expert_gradients(layers: Sequence[HomeExperts]) -> list[torch.Tensor]:
    """The gradients of single experts, in the order of their ids."""
    gradients: list[torch.Tensor] = []
    for layer in layers:
        for tensor in layer.tensors:
            of_rows = tensor.grad if isinstance(tensor, torch.Tensor) else [parameter.grad for parameter in tensor]
            if of_rows is not None:
                gradients += [gradient for gradient in of_rows if gradient is not None]
    return gradients


def _square_sum(gradients: list[torch.Tensor], device: torch.device | None) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(gradients)
    return torch.stack([norm.double() for norm in norms]).square().sum()
