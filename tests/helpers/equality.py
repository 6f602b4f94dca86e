"""Comparison of the runtime with one process that holds the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers.late_device import unwaited
from helpers.moe_model import ALL_LISTS, Shape, TinyMoE, matches
from helpers.planned_steps import rows_of
from helpers.random_plans import random_placement, random_plan, random_schedule, random_trace
from helpers.rank_pool import scattered_groups
from trimtab.planner import Workload
from trimtab.runtime import Session
from trimtab.runtime.transfer.peer_memory import PeerMemory

CHECKPOINTING = ("plain", "checkpoint", "checkpoint without early stop", "reentrant checkpoint")


@dataclass(frozen=True)
class Case:
    """One random comparison.

    Attributes:
        seed: of everything random.
        dtype: float64 (relative error 1e-12) or float32 (1e-5).
        groups: expert-parallel groups of the ranks.
        one_sided: pull replicas out of the memory of neighbours, as on CUDA.
        given: give the session process groups of scattered ranks, and scattered nodes.
        listed: some or all expert tensors are lists of Parameters.
        timeout: of the session; that of the process group by default.
    """

    seed: int
    dtype: torch.dtype = torch.float64
    groups: int = 1
    one_sided: bool = False
    given: bool = False
    listed: bool = False
    timeout: timedelta | None = None

    @property
    def run_block(self) -> str:
        """How blocks are run, see `CHECKPOINTING`."""
        return CHECKPOINTING[self.seed % 4]

    @property
    def max_norm(self) -> float | None:
        """Clip to this norm, or not at all."""
        return 0.05 if self.seed % 3 == 1 else None

    @property
    def padded(self) -> bool:
        """Feed rows that belong to no planned token."""
        return self.seed % 5 in (2, 3)


class CountingPeers(PeerMemory):
    """Counts the replicas that this process copied from other ranks' memory."""

    pulled = 0

    def row(self, layer: int, home: int, row: int) -> list[torch.Tensor]:
        CountingPeers.pulled += 1
        return super().row(layer, home, row)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The error relative to the norm of the tensor; absolute if the expected tensor is zero."""
    scale = float(expected.detach().norm()) or 1.0
    return float((actual - expected).detach().norm()) / scale


def compare_cases(cases: Iterable[Case]) -> int:
    """Assert for every case that losses, logits, gradients and weights are those of the single process.

    Returns the number of replicas that this rank copied from other ranks' memory.
    """
    torch.set_num_threads(1)
    before = CountingPeers.pulled
    for case in cases:
        _compare(case)
    return CountingPeers.pulled - before


def _compare(case: Case) -> None:
    rng = np.random.default_rng(case.seed)
    torch.manual_seed(case.seed)
    num_data_ranks = dist.get_world_size()
    num_ranks = num_data_ranks // case.groups
    padding_rng = np.random.default_rng((case.seed, dist.get_rank()))
    shape = Shape(
        layers=int(rng.integers(1, 5)), experts=num_ranks * int(rng.integers(1, 5)),
        top_k=int(rng.integers(1, min(4, num_ranks) + 1)), hidden=int(rng.choice([4, 6, 16])),
        width=int(rng.choice([4, 5, 8])),
        lists=(ALL_LISTS, ("down",), ("gate_up",))[case.seed % 3] if case.listed else (),
    )  # fmt: skip
    tolerance = 1e-12 if case.dtype is torch.float64 else 1e-5
    slots = int(rng.integers(0, 4))
    ranks_per_node = int(rng.choice([size for size in range(1, num_ranks + 1) if num_ranks % size == 0]))
    groups: dict[str, Any] = {"groups": case.groups, "ranks_per_node": ranks_per_node}
    if case.given:
        nodes = np.random.default_rng(case.seed).permutation(num_ranks) // ranks_per_node
        groups = {**scattered_groups(case.groups, case.seed % 2), "nodes": nodes}
    session = Session(
        num_experts=shape.experts, slots_per_rank=slots, ring_layers=int(rng.integers(2, 5)), timeout=case.timeout,
        **groups,
    )  # fmt: skip
    data_rank = session.topology.data_rank
    reference = TinyMoE(shape, case.dtype)
    model = TinyMoE(shape, case.dtype, case.run_block)
    model.load_state_dict(reference.state_dict())
    model.share(session)
    if case.one_sided:
        session.transfers.ring.peers = CountingPeers.in_host_memory(session.topology, session.homes)
    optimizers = [_optimizer(case.seed, m) for m in (reference, model)]
    session.register_optimizers(optimizers[1])

    # Each step has a new random plan: other homes, other replicas on other paths.
    for _ in range(3):
        count = int(rng.integers(1, 9))
        trace = random_trace(
            rng, num_sequences=count, max_length=12, num_layers=shape.layers, num_experts=shape.experts,
            top_k=shape.top_k,
        )  # fmt: skip
        schedule = random_schedule(rng, count, num_ranks=num_data_ranks, num_micro_steps=int(rng.integers(1, 4)))
        placement = random_placement(rng, shape.layers, shape.experts, num_ranks)
        plans = []
        for group in range(case.groups):
            of_group, group_schedule = schedule.of_group(group, num_ranks)
            workload = Workload.from_trace(trace.select(of_group), group_schedule)
            plan = random_plan(
                rng, workload, group_schedule, slots=slots, placement=placement, ranks_per_node=ranks_per_node
            )
            plans.append(plan)
        session.apply_step_plan(plans[session.topology.group], trace.select(schedule.sequences_of(data_rank)))
        tokens, labels = torch.from_numpy(rng.integers(0, shape.vocab, (2, trace.num_tokens)))
        for index, block in enumerate(reference.moe_blocks()):
            block.recorded_ids = torch.from_numpy(trace.expert_ids[:, index].astype(np.int64))

        expected_logits = reference(tokens)
        expected_loss = F.cross_entropy(expected_logits, labels, reduction="sum") / trace.num_tokens
        expected_loss.backward()

        loss = torch.zeros((), dtype=case.dtype)
        for index in rng.permutation(schedule.num_micro_steps):
            mine = np.flatnonzero((schedule.rank == data_rank) & (schedule.micro_step == index))
            rows = rows_of(trace, mine)
            batch, positions = tokens[rows], None
            if case.padded:
                positions = torch.from_numpy(np.sort(padding_rng.permutation(len(rows) + 3)[: len(rows)]))
                batch = torch.zeros(len(rows) + 3, dtype=torch.int64).index_copy(0, positions, tokens[rows])
            for stage in ("recompute", "update"):
                with torch.set_grad_enabled(stage == "update"), session.micro_step(int(index), positions=positions):
                    with unwaited():
                        logits = model(batch)
                    chosen = logits if positions is None else logits[positions]
                    assert relative_error(chosen, expected_logits[rows]) < tolerance, (case, stage, "logits")
                    part = F.cross_entropy(chosen, labels[rows], reduction="sum") / trace.num_tokens
                    if stage == "update":
                        with unwaited():
                            part.backward()
                        loss += part.detach()
        session.finish_gradients(model.replicated())
        dist.all_reduce(loss)
        assert relative_error(loss, expected_loss.detach()) < tolerance, (case, "loss")
        if case.max_norm is not None:
            expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), case.max_norm)
            norm = session.clip_gradients(model.replicated(), case.max_norm)
            assert abs(norm - expected_norm) < tolerance * expected_norm, (case, "norm")
        for layer in session.layers:
            assert set(layer.home_experts) == set(np.flatnonzero(placement.home[layer.index] == session.rank))
        for name, actual, expected, mine_of in matches(model, reference):
            assert actual.grad is not None
            assert expected.grad is not None
            assert relative_error(actual.grad, expected.grad[mine_of]) < tolerance, (case, name, "gradient")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = session.logical_state_dict(model)
        for name, expected in reference.state_dict().items():
            assert relative_error(state[name], expected) < tolerance, (case, name, "weights")
    session.close()


def _optimizer(seed: int, model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer with rows of state. Its epsilon is large, since Adam divides by values that may be tiny."""
    if seed % 2:
        return torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
