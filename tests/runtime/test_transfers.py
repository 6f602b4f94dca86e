"""Around the transfers: what they cost in memory, which dtypes travel, what is refused before any work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers.equality import relative_error
from helpers.moe_model import Shape, TinyMoE
from helpers.random_plans import random_placement, random_plan, random_schedule, random_trace
from trimtab.errors import InputError, RanksDisagreeError
from trimtab.planner import Placement, Schedule, StepPlan, Workload
from trimtab.planner.paths import HOST, PEER
from trimtab.runtime import PlanReport, Session
from trimtab.runtime.launch import launch
from trimtab.runtime.mirror import SHARED_MEMORY
from trimtab.trace import RoutingTrace

SHAPE = Shape(layers=4, experts=8, top_k=2, hidden=16, width=8)


class Step:
    """One random step of a tiny model: sequences, schedule, plan, and the batch that goes with them."""

    def __init__(self, seed: int, *, shape: Shape = SHAPE, slots: int = 2, moves: bool = True, long: int = 12) -> None:
        self.rng = np.random.default_rng(seed)
        num_ranks = dist.get_world_size()
        self.trace: RoutingTrace = random_trace(
            self.rng, num_sequences=8, max_length=long, num_layers=shape.layers, num_experts=8, top_k=shape.top_k
        )
        self.schedule: Schedule = random_schedule(self.rng, 8, num_ranks=num_ranks, num_micro_steps=2)
        self.workload = Workload.from_trace(self.trace, self.schedule)
        placement = random_placement(self.rng, shape.layers, shape.experts, num_ranks)
        if not moves:
            placement = Placement.contiguous(shape.layers, shape.experts, num_ranks)
        self.plan: StepPlan = random_plan(self.rng, self.workload, self.schedule, slots=slots, placement=placement)
        self.tokens = torch.from_numpy(self.rng.integers(0, shape.vocab, self.trace.num_tokens))
        self.labels = torch.from_numpy(self.rng.integers(0, shape.vocab, self.trace.num_tokens))

    def adopt(self, session: Session, plan: StepPlan | None = None) -> PlanReport:
        return session.adopt(plan or self.plan, self.trace.select(self.schedule.sequences_of(session.rank)))

    def run(self, session: Session, model: TinyMoE) -> torch.Tensor:
        """Forward and backward of all micro-steps; the loss over all ranks."""
        total = torch.zeros(())
        for index in range(self.schedule.num_micro_steps):
            mine = np.flatnonzero((self.schedule.rank == session.rank) & (self.schedule.micro_step == index))
            starts = self.trace.sequence_starts
            rows = np.concatenate([*(np.arange(starts[s], starts[s + 1]) for s in mine), np.empty(0, np.int64)])
            with session.micro_step(index):
                part = self.loss(model, torch.from_numpy(rows))
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
    dtype: torch.dtype = torch.float32, compute_dtype: torch.dtype | None = None, shape: Shape = SHAPE, **settings: int
) -> tuple[Session, TinyMoE, TinyMoE]:
    """A session with its model, and the whole model on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    session = Session(num_experts=shape.experts, **settings)  # type: ignore[arg-type]
    reference = TinyMoE(shape, torch.float32)
    model = TinyMoE(shape, dtype)
    model.load_state_dict(reference.state_dict())
    reference.load_state_dict(model.state_dict())
    for block in model.moe_blocks():
        block.compute_dtype = compute_dtype
    model.share(session)
    return session, model, reference


def compare_low_precision() -> None:
    """bf16 parameters, and float32 parameters computed in bf16: near float32, over optimizer steps and moves."""
    for dtype, compute_dtype in ((torch.bfloat16, None), (torch.float32, torch.bfloat16)):
        session, model, reference = make(dtype, compute_dtype)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (reference, model)]
        session.train_with(optimizers[1])
        for seed in range(3):
            step = Step(seed)
            step.adopt(session)
            expected = step.reference_loss(reference)
            expected.backward()
            loss = step.run(session, model)
            assert relative_error(loss, expected.detach()) < 0.02, (dtype, compute_dtype, seed)
            for layer, block in zip(session.layers, reference.moe_blocks(), strict=True):
                for parameter, whole in zip(layer.parameters, (block.gate_up, block.down), strict=True):
                    assert parameter.grad is not None
                    assert parameter.grad.dtype is dtype
                    assert whole.grad is not None
                    wanted = whole.grad[torch.from_numpy(layer.home_experts)]
                    assert relative_error(parameter.grad.float(), wanted) < 0.06, (dtype, compute_dtype, seed)
                    assert layer.homes.sources[0][0].dtype is torch.bfloat16
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        # Outside a micro-step the parameters themselves count, staged or not.
        tokens = torch.arange(SHAPE.vocab)
        for block in reference.moe_blocks():
            block.recorded_ids = None
        before = model(tokens)
        with torch.no_grad():
            for parameter in session.layers[0].parameters:
                parameter.zero_()
        assert relative_error(model(tokens).float(), before.float()) > 0.01


def test_low_precision_stays_near_float32() -> None:
    launch(compare_low_precision, (), ranks=2)


def run_frozen_experts() -> None:
    """Some or all stacked tensors frozen: they get no gradient, everything else its usual one."""
    for frozen in (("gate_up",), ("down",), ("gate_up", "down")):
        session, model, reference = make()
        for m in (model, reference):
            for block in m.moe_blocks():
                for name in frozen:
                    getattr(block, name).requires_grad_(False)
        step = Step(3, moves=False)
        assert step.plan.num_replicas > 0
        step.adopt(session)
        step.reference_loss(reference).backward()
        step.run(session, model)
        for name, parameter in model.named_parameters():
            whole = reference.get_parameter(name)
            if not whole.requires_grad:
                assert parameter.grad is None, name
                continue
            assert parameter.grad is not None, name
            assert whole.grad is not None
            is_expert = name.endswith(("gate_up", "down"))
            wanted = whole.grad[torch.from_numpy(session.layers[0].home_experts)] if is_expert else whole.grad
            assert relative_error(parameter.grad, wanted) < 1e-5, (frozen, name)


def test_frozen_experts_are_replicated_without_gradients() -> None:
    launch(run_frozen_experts, (), ranks=2)


def measure_memory() -> None:
    """The pool does not grow with depth; host memory is bounded; nothing of it is left in the file system."""
    pools = []
    for layers in (4, 16):
        shape = replace(SHAPE, layers=layers)
        session, model, _ = make(shape=shape)
        step = Step(0, shape=shape, moves=False)
        report = step.adopt(session)
        step.run(session, model)
        pools.append(report.pool_bytes)
        expert_bytes = session.homes[0].expert_bytes
        ring, returns = session.transfers.ring, session.transfers.returns
        assert ring.nbytes == session.ring_layers * session.slots_per_rank * expert_bytes
        most = np.unique(step.plan.mirror_entries(0), axis=0)
        assert report.mirror_bytes == len(most) * expert_bytes > 0
        assert returns.nbytes <= session.ring_layers * session.num_ranks * session.slots_per_rank * expert_bytes
        session.close()
    assert pools[0] == pools[1]
    dist.barrier()
    assert not list(SHARED_MEMORY.glob("trimtab-*"))


def test_memory_does_not_grow_with_depth() -> None:
    launch(measure_memory, (), ranks=2)


def measure_paths() -> None:
    """Each path alone carries all replicas, both carry some each; the figures say so."""
    trace = random_trace(
        np.random.default_rng(1), num_sequences=16, max_length=1500, num_layers=4, num_experts=8, top_k=2
    )
    schedule = random_schedule(np.random.default_rng(1), 16, num_ranks=2, num_micro_steps=2)
    for paths in ("peer", "host", "both"):
        session, _, _ = make(paths=paths)  # type: ignore[arg-type]
        mine = trace.select(schedule.sequences_of(session.rank))
        report = session.plan(mine, schedule)
        assert report.replicas > 0
        used = set(session.step_plan.replica_paths.tolist())
        assert used == {"peer": {PEER}, "host": {HOST}}.get(paths, used)
        assert (report.mirror_bytes > 0) == (HOST in used)
    with pytest.raises(InputError, match="some replicas have no path"):
        make(paths="host", mirror_bytes=10)[0].plan(mine, schedule)  # type: ignore[arg-type]
    session = make(mirror_bytes=10)[0]
    session.plan(mine, schedule)
    assert session.transfers.ring.mirror.nbytes == 0


def plan_for_too_little() -> None:
    """A plan that saves less than asked for is not carried out: no replicas, no moves, and it says so."""
    trace = random_trace(
        np.random.default_rng(1), num_sequences=16, max_length=1500, num_layers=4, num_experts=8, top_k=2
    )
    schedule = random_schedule(np.random.default_rng(1), 16, num_ranks=2, num_micro_steps=2)
    gains = {}
    for least_gain in (0.0, 0.9):
        session, model, _ = make(least_gain=least_gain)  # type: ignore[arg-type]
        session.train_with(torch.optim.SGD(model.parameters(), lr=0.1))
        report = session.plan(trace.select(schedule.sequences_of(session.rank)), schedule)
        gains[least_gain] = report.predicted_gain
        carried_out = least_gain == 0.0
        assert (report.replicas + report.homes_moved > 0) == carried_out
        assert (report.max_vio_after < report.max_vio_before) == carried_out
        assert (report.peak_rows_after < report.peak_rows_before) == carried_out
        assert report.unplanned_micro_steps == 0
    assert 0 < gains[0.0] == gains[0.9] < 0.9


def test_a_plan_that_saves_too_little_is_not_carried_out() -> None:
    launch(plan_for_too_little, (), ranks=2)


def test_paths_can_be_chosen() -> None:
    launch(measure_paths, (), ranks=2)


def refuse_plans() -> None:
    session, model, _ = make()
    step = Step(1)
    with pytest.raises(InputError, match=r"the plan moves \d+ experts .* train_with"):
        step.adopt(session)
    session.train_with(torch.optim.SGD(model.parameters(), lr=0.1))
    other = replace(step.plan, settings=f"rank {session.rank}")
    with pytest.raises(RanksDisagreeError, match=r"adopt\(\): the plan is '\w+' on rank 0 and '\w+' on rank 1"):
        step.adopt(session, other)
    assert np.array_equal(session.placement.home, Placement.contiguous(4, 8, 2).home)
    step.adopt(session)
    assert np.array_equal(session.placement.home, step.plan.home)
    step.run(session, model)
    with pytest.raises(RuntimeError, match="gradients that wait for an optimizer step"):
        Step(2).adopt(session)
    with pytest.raises(InputError, match="slots a rank; this session has 2"):
        Step(1, slots=3).adopt(session)


def test_plans_that_do_not_fit_are_refused_before_any_work() -> None:
    launch(refuse_plans, (), ranks=2)


def plan_own_schedules(groups: int) -> None:
    """The planner's own schedule, homes and replicas, for one and several groups: the gradient of the plain model."""
    session, model, reference = make(groups=groups)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=0.1) for m in (reference, model)]
    session.train_with(optimizers[1])
    data_rank, num_data_ranks = dist.get_rank(), dist.get_world_size()
    for seed in range(3):
        trace = random_trace(
            np.random.default_rng(seed), num_sequences=24, max_length=600, num_layers=4, num_experts=8, top_k=2
        )
        of_rank = np.arange(24) * num_data_ranks // 24
        mini_batch = np.arange(24) % 2
        planned = session.plan_sequences(
            trace.select(np.flatnonzero(of_rank == data_rank)), token_budget=1200, mini_batch=mini_batch
        )
        schedule = planned.schedule
        assert np.array_equal(schedule.mini_batch_of_micro_step[schedule.micro_step], mini_batch)
        report = session.adopt(planned, trace.select(schedule.sequences_of(data_rank)))
        assert report.max_vio_after < report.max_vio_before
        step = Step(0)
        rng = np.random.default_rng(seed)
        step.trace = trace
        step.tokens, step.labels = (torch.from_numpy(rng.integers(0, 11, trace.num_tokens)) for _ in range(2))
        for batch in range(2):
            # Several optimizer steps within one RL step: the weights change, the plan goes on.
            rows = [np.arange(trace.sequence_starts[s], trace.sequence_starts[s + 1]) for s in range(24)]
            for index in schedule.micro_steps_of(batch):
                mine = np.flatnonzero((schedule.rank == data_rank) & (schedule.micro_step == index))
                with session.micro_step(int(index)):
                    chosen = np.concatenate([*(rows[s] for s in mine), np.empty(0, np.int64)])
                    step.loss(model, torch.from_numpy(chosen)).backward()
            session.finish_gradients(model.replicated())
            members = np.concatenate([rows[s] for s in np.flatnonzero(mini_batch == batch)])
            for layer, block in enumerate(reference.moe_blocks()):
                block.recorded_ids = torch.from_numpy(trace.expert_ids[members, layer].astype(np.int64))
            step.loss(reference, torch.from_numpy(members)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state = session.logical_state_dict(model)
        for name, expected in reference.state_dict().items():
            assert relative_error(state[name], expected) < 1e-4, (seed, name)


@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (4, 2)])
def test_own_schedules_train_as_the_plain_model(ranks: int, groups: int) -> None:
    launch(plan_own_schedules, (groups,), ranks=ranks)


def test_no_shared_memory_is_left_behind() -> None:
    assert not list(Path(SHARED_MEMORY).glob("trimtab-*"))
