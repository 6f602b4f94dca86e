"""`check_paths`: one micro-step with replicas on each path, compared with one process that has all experts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from trimtab.cluster import ClusterSpec
from trimtab.launch import launch
from trimtab.planner import Placement, Schedule, StepPlan, Workload
from trimtab.planner.replicas.paths import HOST, PEER
from trimtab.rank_variables import rank_variable
from trimtab.runtime.rows.expert_compute import gated_experts
from trimtab.runtime.session import Session
from trimtab.trace import RoutingTrace, synthesize

PATHS = {"peer": PEER, "host": HOST}
# More layers than the ring has places, so that backward has to fetch replicas again.
LAYERS, EXPERTS_PER_RANK, TOP_K, HIDDEN, WIDTH, TOKENS_PER_RANK = 4, 4, 2, 16, 8, 64


@dataclass(frozen=True)
class PathCheck:
    """Result of a micro-step with all replicas on one path.

    Attributes:
        path: `peer` or `host`.
        replicas: in all layers, on all ranks.
        error: the largest error of loss and gradients, relative to the norm of the single process's, in float64.
    """

    path: str
    replicas: int
    error: float


def check_paths(ranks: int) -> list[PathCheck]:
    """Compare both paths on local ranks, or on those of torchrun, where only rank 0 gets the result.

    Raises:
        InputError: if shared memory is too small for the host path.
        RankFailedError: if a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checks.json"
        launch(_check_on_rank, (file,), ranks=ranks)
        return [PathCheck(**check) for check in json.loads(file.read_text())] if file.exists() else []


def _check_on_rank(file: Path) -> None:
    checks = [_check_path(path) for path in PATHS]
    if dist.get_rank() == 0:
        file.write_text(json.dumps([asdict(check) for check in checks]))


def _check_path(path: str) -> PathCheck:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    num_experts = ranks * EXPERTS_PER_RANK
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    trace = synthesize(
        num_sequences=ranks, sequence_length=TOKENS_PER_RANK, num_layers=LAYERS, num_experts=num_experts, top_k=TOP_K,
        zipf=1.0,
    )  # fmt: skip
    mine = np.arange(rank * TOKENS_PER_RANK, (rank + 1) * TOKENS_PER_RANK)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).div_(shape[-1] ** 0.5).to(device)

    hidden, target = draw(trace.num_tokens, HIDDEN), draw(trace.num_tokens, HIDDEN)
    whole = [
        [draw(num_experts, HIDDEN), draw(num_experts, 2 * WIDTH, HIDDEN), draw(num_experts, HIDDEN, WIDTH)]
        for _ in range(LAYERS)
    ]
    ids_TLK = torch.from_numpy(trace.expert_ids.astype(np.int64)).to(device)

    expected_loss, expected = _one_process(whole, ids_TLK, hidden, target)
    session = Session(num_experts=num_experts, ranks_per_node=rank_variable("LOCAL_WORLD_SIZE", ranks))
    home = torch.from_numpy(session.home_experts).to(device)
    shared = [[router, gate_up[home], down[home]] for router, gate_up, down in whole]
    loss, gradients, replicas = _in_session(session, shared, trace, path, hidden[mine], target[mine])
    wanted = [[router, gate_up[home], down[home]] for router, gate_up, down in expected]
    errors = [_relative_error(loss, expected_loss)]
    for layer, wanted_layer in zip(gradients, wanted, strict=True):
        errors += [_relative_error(a, w) for a, w in zip(layer, wanted_layer, strict=True)]
    worst = torch.stack(errors).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    session.close()
    return PathCheck(path, replicas, float(worst))


def _one_process(
    whole: Sequence[Sequence[torch.Tensor]], ids_TLK: torch.Tensor, hidden: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Loss, and gradients of router, gate_up and down of every layer, by plain loops over experts."""
    parameters = [[tensor.clone().requires_grad_() for tensor in layer] for layer in whole]
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
    loss = (hidden * target).sum()
    loss.backward()
    return loss.detach(), [[_gradient(tensor) for tensor in layer] for layer in parameters]


def _in_session(
    session: Session,
    shared: Sequence[Sequence[torch.Tensor]],
    trace: RoutingTrace,
    path: str,
    hidden: torch.Tensor,
    target: torch.Tensor,
) -> tuple[torch.Tensor, list[list[torch.Tensor]], int]:
    """Loss summed over ranks, gradients of this rank's home experts, and the number of replicas of the plan."""
    parameters = [[torch.nn.Parameter(tensor.clone()) for tensor in layer] for layer in shared]
    layers = [session.add_layer([gate_up, down], gated_experts()) for _, gate_up, down in parameters]
    ranks = session.num_ranks
    schedule = Schedule(np.zeros(ranks, np.int32), np.arange(ranks, dtype=np.int32), np.zeros(1, np.int32), ranks)
    plan = _plan(trace, schedule, PATHS[path], session.topology.ranks_per_node)
    session.apply_step_plan(plan, trace.select(schedule.sequences_of(session.rank)))
    with session.micro_step(0):
        for layer, (router, _, _) in zip(layers, parameters, strict=True):
            logits = hidden @ router.T
            ids = layer.route(logits.topk(TOP_K).indices)
            hidden = hidden + layer(hidden, ids, logits.softmax(-1).gather(1, ids))
        loss = (hidden * target).sum()
        loss.backward()
    session.finish_gradients([router for router, _, _ in parameters])
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total, [[_gradient(tensor) for tensor in layer] for layer in parameters], plan.num_replicas


def _plan(trace: RoutingTrace, schedule: Schedule, path: int, ranks_per_node: int) -> StepPlan:
    """A plan with a replica of each rank's busiest expert on the next rank, for half of its tokens, in every layer."""
    ranks = schedule.num_ranks
    placement = Placement.contiguous(trace.num_layers, trace.num_experts, ranks)
    workload = Workload.from_trace(trace, schedule)
    replicas, quotas = [], []
    for counts_RE in workload.token_counts_MLRE[0]:
        busiest_R = counts_RE.sum(axis=0).reshape(ranks, -1).argmax(axis=1) + np.arange(ranks) * EXPERTS_PER_RANK
        replicas.append(np.stack([busiest_R, (np.arange(ranks) + 1) % ranks], axis=1))
        quotas.append(counts_RE[:, busiest_R].T.astype(np.int64) // 2)
    cluster = ClusterSpec(ranks, ranks_per_node, slots_per_rank=1)
    plan = StepPlan.from_instances(schedule, placement, replicas, quotas, mixed_ML=workload.mixed_ML, cluster=cluster)
    return replace(plan, replica_paths=np.full(plan.num_replicas, path, np.uint8))


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (actual - expected).norm() / expected.norm().clamp(min=1e-30)
