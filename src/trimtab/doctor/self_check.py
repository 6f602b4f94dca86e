"""`check_paths`: one micro-step with replicas on each path, compared with one process that has all experts."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from trimtab.calibration.measurement import this_device
from trimtab.doctor.planned_micro_step import PATHS, PlannedMicroStep, StepSizes
from trimtab.launch import launch
from trimtab.runtime.session_settings import Paths

# Largest relative error of loss and gradients, in float64.
TOLERANCE = 1e-12
# In other dtypes, the error may be that of one process in the same dtype times this: sums have another order, and
# gradients of replicas are added apart.
TIMES_ONE_PROCESS = 3.0

SMALL = StepSizes()


@dataclass(frozen=True)
class PathCheck:
    """Result of a micro-step with all replicas on one path.

    Attributes:
        path: `peer`, `host` or `message`.
        replicas: in all layers, on all ranks.
        error: the largest error of loss and gradients, relative to the norm of those of one process in float64.
        dtype: of parameters and compute.
        allowed: largest error of a right result.
        reads_peers: replicas of the path `peer` were read from the memory of other ranks, not sent as messages.
    """

    path: str
    replicas: int
    error: float
    dtype: str = "float64"
    allowed: float = TOLERANCE
    reads_peers: bool = True

    @property
    def is_equal(self) -> bool:
        return self.error < self.allowed


def check_paths(ranks: int) -> list[PathCheck]:
    """Compare all paths on local ranks, or on those of torchrun, where only rank 0 gets the result.

    Raises:
        InputError: if shared memory is too small for the host path.
        RankFailedError: if a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checks.json"
        launch(_check_on_rank, (file,), ranks=ranks)
        return [PathCheck(**check) for check in json.loads(file.read_text())] if file.exists() else []


def _check_on_rank(file: Path) -> None:
    checks = [check_path(path) for path in PATHS]
    if dist.get_rank() == 0:
        file.write_text(json.dumps([asdict(check) for check in checks]))


def check_path(path: Paths, sizes: StepSizes = SMALL, *, repetitions: int = 1) -> PathCheck:
    """Compare a micro-step on these ranks with one process. Collective; all ranks get the same result.

    Args:
        repetitions: how often the micro-step runs; each is compared.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    num_experts, device = ranks * sizes.experts_per_rank, this_device()
    trace = sizes.trace(ranks)
    mine = slice(rank * sizes.tokens_per_rank, (rank + 1) * sizes.tokens_per_rank)
    home = slice(rank * sizes.experts_per_rank, (rank + 1) * sizes.experts_per_rank)
    # The same on all ranks.
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64, device=device)
        return values.div_(shape[-1] ** 0.5).to(sizes.dtype)

    hidden, target = draw(trace.num_tokens, sizes.hidden), draw(trace.num_tokens, sizes.hidden)
    whole = [
        [draw(num_experts, sizes.hidden), *(draw(*shape) for shape in sizes.shapes(num_experts))]
        for _ in range(sizes.layers)
    ]
    ids_TLK = torch.from_numpy(trace.expert_ids.astype(np.int64)).to(device)
    expected_T, expected = _one_process(whole, ids_TLK, hidden, target, torch.float64)
    allowed = TOLERANCE
    if sizes.dtype is not torch.float64:
        losses_T, alone = _one_process(whole, ids_TLK, hidden, target, sizes.dtype)
        pairs = [(losses_T, expected_T), *_pairs(alone, expected)]
        allowed = TIMES_ONE_PROCESS * float(_largest_error(pairs))

    shared = [[router, gate_up[home], down[home]] for router, gate_up, down in whole]
    step = PlannedMicroStep(sizes, path, shared)
    wanted = [[router, gate_up[home], down[home]] for router, gate_up, down in expected]
    errors = []
    for _ in range(repetitions):
        for parameter in itertools.chain(*step.parameters):
            parameter.grad = None
        losses_T = _losses(step.run(hidden[mine], target[mine]), target[mine])
        gradients = [[_gradient(tensor) for tensor in layer] for layer in step.parameters]
        errors.append(_largest_error([(losses_T, expected_T[mine]), *_pairs(gradients, wanted)]))
    worst = torch.stack(errors).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dtype = str(sizes.dtype).removeprefix("torch.")
    check = PathCheck(path, step.plan.num_replicas, float(worst), dtype, allowed, step.reads_peers)
    step.session.close()
    return check


def _one_process(
    whole: Sequence[Sequence[torch.Tensor]],
    ids_TLK: torch.Tensor,
    hidden: torch.Tensor,
    target: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Loss of every token, and gradients of router, gate_up and down of every layer, by plain loops over experts."""
    parameters = [[tensor.to(dtype, copy=True).requires_grad_() for tensor in layer] for layer in whole]
    hidden, target = hidden.to(dtype), target.to(dtype)
    for index, (router, gate_up, down) in enumerate(parameters):
        ids = ids_TLK[:, index]
        weights = (hidden @ router.T).softmax(-1).gather(1, ids)
        added = torch.zeros_like(hidden)
        for expert in range(len(router)):
            token, k = (ids == expert).nonzero(as_tuple=True)
            gate, up = (hidden[token] @ gate_up[expert].T).chunk(2, dim=-1)
            rows = (F.silu(gate) * up) @ down[expert].T
            added = added.index_add(0, token, rows * weights[token, k, None])
        hidden = hidden + added
    hidden.backward(target)
    return _losses(hidden.detach(), target), [[_gradient(tensor) for tensor in layer] for layer in parameters]


def _losses(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The part of each token in the loss, `[n]` float64."""
    return (output.double() * target.double()).sum(-1)


def _pairs(
    actual: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[torch.Tensor]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [pair for layer in zip(actual, expected, strict=True) for pair in zip(*layer, strict=True)]


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _largest_error(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Of (actual, expected) pairs, the largest difference relative to what is expected. NaN if a value is NaN."""
    return torch.stack(
        [(actual.double() - expected).norm() / expected.norm().clamp(min=1e-30) for actual, expected in pairs]
    ).max()
