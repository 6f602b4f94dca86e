"""Random planned steps of a tiny model with replicas, in a session of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers.moe_model import Shape, TinyMoE
from helpers.random_plans import random_plan, random_schedule, random_trace
from trimtab.array_type import Array
from trimtab.planner import Placement, Schedule, StepPlan, Workload
from trimtab.runtime import PlanReport, Session
from trimtab.trace import RoutingTrace

SHAPE = Shape(layers=4, experts=8, top_k=2, hidden=16, width=8)


def rows_of(trace: RoutingTrace, sequences: Array) -> torch.Tensor:
    """Numbers of the tokens of some sequences."""
    parts = [np.arange(*trace.sequence_starts[s : s + 2]) for s in sequences]
    return torch.from_numpy(np.concatenate([*parts, np.empty(0, np.int64)]))


def rows_in(trace: RoutingTrace, schedule: Schedule, micro_step: int, rank: int | None = None) -> torch.Tensor:
    """Numbers of the tokens of a micro-step, of one data rank or all."""
    of_rank = True if rank is None else schedule.rank == rank
    return rows_of(trace, np.flatnonzero((schedule.micro_step == micro_step) & of_rank))


class Step:
    """One random step of a tiny model: sequences, schedule, plan, and the batch that goes with them."""

    def __init__(self, seed: int, *, shape: Shape = SHAPE, slots: int = 2, long: int = 12) -> None:
        self.rng = np.random.default_rng(seed)
        num_ranks = dist.get_world_size()
        self.trace: RoutingTrace = random_trace(
            self.rng, num_sequences=8, max_length=long, num_layers=shape.layers, num_experts=8, top_k=shape.top_k
        )
        self.schedule: Schedule = random_schedule(self.rng, 8, num_ranks=num_ranks, num_micro_steps=2)
        self.workload = Workload.from_trace(self.trace, self.schedule)
        placement = Placement.contiguous(shape.layers, shape.experts, num_ranks)
        self.plan: StepPlan = random_plan(self.rng, self.workload, self.schedule, slots=slots, placement=placement)
        self.tokens = torch.from_numpy(self.rng.integers(0, shape.vocab, self.trace.num_tokens))
        self.labels = torch.from_numpy(self.rng.integers(0, shape.vocab, self.trace.num_tokens))

    def apply(self, session: Session, plan: StepPlan | None = None) -> PlanReport:
        return session.apply_step_plan(plan or self.plan, self.trace.select(self.schedule.sequences_of(session.rank)))

    def run(self, session: Session, model: TinyMoE) -> torch.Tensor:
        """Forward and backward of all micro-steps; the loss over all ranks."""
        total = torch.zeros(())
        for index in range(self.schedule.num_micro_steps):
            mine = np.flatnonzero((self.schedule.rank == session.rank) & (self.schedule.micro_step == index))
            with session.micro_step(index):
                part = self.loss(model, rows_of(self.trace, mine))
                part.backward()
            total += part.detach().float()
        session.finish_gradients(model.replicated())
        dist.all_reduce(total)
        return total

    def loss(self, model: TinyMoE, rows: torch.Tensor) -> torch.Tensor:
        logits = model(self.tokens[rows])
        return F.cross_entropy(logits.float(), self.labels[rows], reduction="sum") / self.trace.num_tokens

    def reference_loss(self, model: TinyMoE) -> torch.Tensor:
        for index, block in enumerate(model.moe_blocks()):
            block.recorded_ids = torch.from_numpy(self.trace.expert_ids[:, index].astype(np.int64))
        return self.loss(model, torch.arange(self.trace.num_tokens))


def make(
    dtype: torch.dtype = torch.float32, compute_dtype: torch.dtype | None = None, shape: Shape = SHAPE, **settings: Any
) -> tuple[Session, TinyMoE, TinyMoE]:
    """A session with its model, and the whole model on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    session = Session(num_experts=shape.experts, **settings)
    reference = TinyMoE(shape, torch.float32)
    model = TinyMoE(shape, dtype)
    model.load_state_dict(reference.state_dict())
    reference.load_state_dict(model.state_dict())
    for block in model.moe_blocks():
        block.compute_dtype = compute_dtype
    model.share(session)
    return session, model, reference
