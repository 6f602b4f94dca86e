"""Weights that change during a plan, lower precision, frozen experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers.equality import relative_error
from helpers.late_copies import LateCopies
from helpers.moe_model import Shape, TinyMoE
from helpers.random_plans import random_plan, random_schedule, random_trace
from helpers.rank_pool import on_ranks
from trimtab.planner import Schedule, Workload
from trimtab.planner.replicas.paths import HOST
from trimtab.runtime import PlanReport, Session
from trimtab.trace import RoutingTrace

# Deeper than the ring, so that backward fetches again what forward dropped.
SHAPE = Shape(layers=5, experts=4, top_k=2, hidden=8, width=8)
MICRO_STEPS = 2

Result = tuple[torch.Tensor, list[torch.Tensor]]


@dataclass(eq=False)
class Run:
    """A model in a session with a planned step, and the loss and gradients of that step."""

    session: Session
    model: TinyMoE
    report: PlanReport

    @classmethod
    def start(
        cls,
        *,
        with_replicas: bool,
        state: dict[str, torch.Tensor] | None = None,
        compute_dtype: torch.dtype | None = None,
        frozen: bool = False,
    ) -> Run:
        """The same step in every run: all sequences, routes and replicas come from one seed."""
        torch.set_num_threads(1)
        torch.manual_seed(1)
        model = TinyMoE(SHAPE, torch.float64 if compute_dtype is None else torch.float32)
        if state is not None:
            model.load_state_dict(state)
        session = Session(num_experts=SHAPE.experts, ring_layers=2)
        for block in model.moe_blocks():
            block.compute_dtype = compute_dtype
        model.share(session)
        for block in model.moe_blocks():
            block.gate_up.requires_grad_(not frozen)
        trace, schedule = step_of(session)
        plan = random_plan(
            np.random.default_rng(3), Workload.from_trace(trace, schedule), schedule, slots=2 if with_replicas else 0
        )
        # Most replicas come from host memory, which must be refreshed.
        paths = np.where(np.arange(plan.num_replicas) % 3, HOST, plan.replica_paths).astype(np.uint8)
        plan = replace(plan, replica_paths=paths)
        assert (plan.num_replicas > 10) == with_replicas
        report = session.apply_step_plan(plan, trace.select(schedule.sequences_of(session.rank)))
        session.transfers.ring.host_copies = LateCopies()  # type: ignore[assignment]
        return cls(session, model, report)

    def step(self) -> Result:
        trace, schedule = step_of(self.session)
        rng = np.random.default_rng(4)
        tokens, labels = (torch.from_numpy(rng.integers(0, SHAPE.vocab, trace.num_tokens)) for _ in range(2))
        self.model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for index in range(MICRO_STEPS):
            mine = np.flatnonzero((schedule.rank == self.session.rank) & (schedule.micro_step == index))
            of_trace = [np.arange(trace.sequence_starts[s], trace.sequence_starts[s + 1]) for s in mine]
            rows = torch.from_numpy(np.concatenate([*of_trace, np.empty(0, np.int64)]))
            with self.session.micro_step(index):
                loss = F.cross_entropy(self.model(tokens[rows]), labels[rows], reduction="sum") / trace.num_tokens
                loss.backward()
            total += loss.detach()
        self.session.finish_gradients(self.model.replicated())
        dist.all_reduce(total)
        return total, [p.grad.clone() for p in self.model.parameters() if p.requires_grad and p.grad is not None]


def step_of(session: Session) -> tuple[RoutingTrace, Schedule]:
    """The sequences of all ranks, and their ranks."""
    rng = np.random.default_rng(2)
    trace = random_trace(
        rng, num_sequences=8, max_length=30, num_layers=SHAPE.layers, num_experts=SHAPE.experts, top_k=SHAPE.top_k
    )
    return trace, random_schedule(rng, 8, num_ranks=session.num_ranks, num_micro_steps=MICRO_STEPS)


def assert_equal(tolerance: float, one: Result, other: Result) -> None:
    assert relative_error(one[0], other[0]) < tolerance
    for mine, theirs in zip(one[1], other[1], strict=True):
        assert relative_error(mine, theirs) < tolerance


def step_under_one_plan() -> None:
    """Optimizer steps, then loaded weights: mirrors are refreshed without more memory."""
    runs = [Run.start(with_replicas=True), Run.start(with_replicas=False)]
    optimizers = [torch.optim.SGD(run.model.parameters(), lr=0.5) for run in runs]
    losses = []
    for _ in range(3):
        results = [run.step() for run in runs]
        assert_equal(1e-12, *results)
        losses.append(float(results[0][0]))
        for optimizer in optimizers:
            optimizer.step()
    assert losses[2] < losses[1] < losses[0]
    for run in runs:
        with run.session.micro_step(0):
            pass  # Refreshes the mirrors.
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(0.7)
        run.session.weights_changed()
    assert_equal(1e-12, *(run.step() for run in runs))
    transfers, report = runs[0].session.transfers, runs[0].report
    assert report.mirror_bytes > 0
    assert transfers.ring.nbytes + transfers.returns.nbytes == report.pool_bytes
    assert transfers.ring.mirror.nbytes == report.mirror_bytes


def test_weights_may_change_under_a_plan() -> None:
    on_ranks(step_under_one_plan, (), ranks=2)


def step_with_frozen_tensors() -> None:
    runs = [Run.start(with_replicas=True, frozen=True), Run.start(with_replicas=False, frozen=True)]
    assert_equal(1e-12, *(run.step() for run in runs))
    assert all(block.gate_up.grad is None for block in runs[0].model.moe_blocks())
    everything_frozen = Run.start(with_replicas=True, frozen=True)
    for block in everything_frozen.model.moe_blocks():
        block.down.requires_grad_(False)
    loss, _ = everything_frozen.step()
    assert relative_error(loss, runs[0].step()[0]) < 1e-12


def test_frozen_tensor_has_replicas_without_gradients() -> None:
    on_ranks(step_with_frozen_tensors, (), ranks=2)


def step_in_lower_precision() -> None:
    """Experts with float32 parameters and bfloat16 compute: staging memory is refreshed after optimizer steps."""
    runs = [Run.start(with_replicas=flag, compute_dtype=torch.bfloat16) for flag in (True, False)]
    optimizers = [torch.optim.SGD(run.model.parameters(), lr=0.5) for run in runs]
    first = [run.step() for run in runs]
    assert_equal(0.02, *first)
    for optimizer in optimizers:
        optimizer.step()
    again = [run.step() for run in runs]
    assert_equal(0.05, *again)
    # A new session with these weights gives the same results.
    state = runs[0].session.logical_state_dict(runs[0].model)
    fresh = Run.start(with_replicas=True, state=state, compute_dtype=torch.bfloat16)
    assert fresh.session.homes[0].sources[0][0].dtype is torch.bfloat16
    assert_equal(1e-6, fresh.step(), again[0])
    assert relative_error(again[0][0], first[0][0]) > 1e-3


def test_experts_may_be_computed_in_lower_precision() -> None:
    on_ranks(step_in_lower_precision, (), ranks=2)
