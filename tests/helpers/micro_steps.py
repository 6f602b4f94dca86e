"""Comparison of `plan_micro_steps` with one process: slices, unknown routes, orders of pipelines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers.equality import relative_error
from helpers.moe_model import WITHOUT_CHECKPOINTS, Shape, TinyMoE, matches
from helpers.plain_dispatch import PlainDispatcher
from helpers.random_plans import all_counts, random_placement, random_plan
from helpers.random_slices import RELEASE, as_header, fails, in_time, random_delay, random_slices, stalls
from helpers.rank_pool import scattered_groups
from trimtab.array_type import Array
from trimtab.planner import Placement, PlannedStep, Schedule
from trimtab.planner.plan.pass_times import PARTS
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.planner.plan.strategy import NOTHING
from trimtab.runtime import MicroStep, Session, step_planner

TOLERANCE = 1e-12
ORDERS = ("one by one", "1F1B", "interleaved", "backwards last")


@dataclass(frozen=True)
class MicroStepCase:
    """One random comparison.

    Attributes:
        seed: of everything random.
        order: of forwards and backwards, see `ORDERS`.
        unknown: the part of the routes by token and layer that is not recorded.
        run_block: how blocks run, see `TinyMoE`.
        plain: dispatch with `PlainDispatcher`.
        complete: recompute without gradients first, and complete the plan with its routes.
        groups: expert-parallel groups of the ranks.
        slices: replicas are planned while the step runs: `in time`; `late` by random delays; in the first step the
            planner of one rank `fails` or `stalls`. None: before it.
        given: give the session process groups of scattered ranks, and scattered nodes.
        deviates: some tokens get other experts than the recorded ones.
    """

    seed: int
    order: str
    unknown: float
    run_block: str = "plain"
    plain: bool = False
    complete: bool = False
    groups: int = 1
    given: bool = False
    slices: str | None = None
    deviates: bool = False


def events(order: str, num_micro_steps: int, num_chunks: int, warm_up: int) -> Iterator[tuple[str, int, int]]:
    """Forwards and backwards as (kind, micro-step, chunk), each backward after its forward and the chunks above."""
    forwards = [("forward", m, chunk) for m in range(num_micro_steps) for chunk in range(num_chunks)]
    backwards = [("backward", m, chunk) for m in range(num_micro_steps) for chunk in reversed(range(num_chunks))]
    if order == "one by one":
        for m in range(num_micro_steps):
            yield from (event for event in forwards + backwards if event[1] == m)
    elif order == "backwards last":
        yield from forwards + backwards
    else:
        if order == "interleaved":
            # Pipeline with several chunks: two micro-steps run through a chunk before the next chunk.
            forwards.sort(key=lambda event: (event[1] // 2, event[2], event[1]))
            backwards.sort(key=lambda event: (event[1] // 2, -event[2], event[1]))
        warm_up = min(warm_up * num_chunks, len(forwards))
        done: set[tuple[int, int]] = set()
        for place in range(len(forwards) + warm_up):
            for event in forwards[place : place + 1]:
                done.add(event[1:])
                yield event
            for event in backwards[place - warm_up : place - warm_up + 1] if place >= warm_up else []:
                assert all((event[1], chunk) in done for chunk in range(num_chunks))
                yield event


def compare_micro_steps(cases: Iterable[MicroStepCase]) -> dict[str, float]:
    """Assert for every case that logits, loss, gradients and weights are those of the single process.

    Returns sums of the sessions' metrics.
    """
    torch.set_num_threads(1)
    total: Counter[str] = Counter()
    for case in cases:
        comparison = _Comparison(case)
        comparison.run()
        total.update(comparison.metrics)
    return dict(total)


class _Comparison:
    def __init__(self, case: MicroStepCase) -> None:
        self.case = case
        self.rng = np.random.default_rng(case.seed)
        torch.manual_seed(case.seed)
        rng, self.num_data_ranks = self.rng, dist.get_world_size()
        ranks = self.num_data_ranks // case.groups
        shape = Shape(
            layers=int(rng.integers(2, 5)), experts=ranks * int(rng.integers(1, 4)), top_k=int(rng.integers(1, 3)),
            hidden=int(rng.choice([4, 6])), width=int(rng.choice([4, 5])),
        )  # fmt: skip
        self.shape = shape
        slots, per_node = int(rng.integers(0, 3)), int(rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0]))
        groups: dict[str, Any] = {"groups": case.groups, "ranks_per_node": per_node}
        if case.given:
            nodes = np.random.default_rng(case.seed).permutation(ranks) // per_node
            groups = {**scattered_groups(case.groups, case.seed % 2), "nodes": nodes}
        self.session = Session(
            num_experts=shape.experts, slots_per_rank=slots, ring_layers=int(rng.integers(2, 4)), least_gain=-1e9,
            **groups,
        )  # fmt: skip
        self.reference = TinyMoE(shape, torch.float64, WITHOUT_CHECKPOINTS.get(case.run_block, "plain"))
        self.model = TinyMoE(shape, torch.float64, case.run_block)
        self.model.load_state_dict(self.reference.state_dict())
        # The framework's group, if there is one.
        experts = groups.get("expert_group", self.session.topology.experts)
        dispatcher = PlainDispatcher(experts, shape.experts // ranks, slots) if case.plain else None
        self.model.share(self.session, dispatcher)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (self.reference, self.model)]
        self.session.register_optimizers(self.optimizers[1])
        self.plan_rng = np.random.default_rng((case.seed, 1))
        # Drawn alike by all groups.
        self.home_rng = np.random.default_rng((case.seed, 5))
        self.metrics: Counter[str] = Counter()

    def run(self) -> None:
        RELEASE.clear()
        delays = {"late": random_delay((self.case.seed, dist.get_rank())), "fails": fails, "stalls": stalls}
        for step in range(4 if self.case.slices == "stalls" else 2):
            is_broken = self.case.slices in ("fails", "stalls") and (step or dist.get_rank() != 1)
            self.delay = delays.get(self.case.slices or "", in_time) if not is_broken else in_time
            self.step()
        RELEASE.set()
        self.session.close()

    def step(self) -> None:
        case, rng, session, shape = self.case, self.rng, self.session, self.shape
        num_tokens, num_micro_steps = int(rng.integers(1, 40)), int(rng.integers(1, 6))
        scores = rng.gumbel(size=(num_tokens, shape.layers, shape.experts)) + rng.gumbel(size=shape.experts)
        ids_TLK = np.argsort(-scores, axis=-1)[:, :, : shape.top_k]
        ids_TLK[rng.random((num_tokens, shape.layers)) < case.unknown] = -1
        tokens, labels = (torch.from_numpy(rng.integers(0, shape.vocab, num_tokens)) for _ in range(2))
        # Slices of sequences: tokens in any order.
        micro_step_T = rng.integers(0, num_micro_steps, num_tokens)
        rank_T = rng.integers(0, self.num_data_ranks, num_tokens)
        mine = rank_T == session.topology.data_rank
        rows_M = [np.flatnonzero(mine & (micro_step_T == m)) for m in range(num_micro_steps)]

        others = np.argsort(rng.random(scores.shape), axis=-1)[:, :, : shape.top_k]
        is_other_TL = rng.random(scores.shape[:2]) < (0.2 if case.deviates else 0)
        self.chosen_ids = np.where(is_other_TL[:, :, None], others, -1)
        for layer, block in enumerate(self.reference.moe_blocks()):
            used = np.where(is_other_TL[:, layer, None], others[:, layer], ids_TLK[:, layer])
            block.recorded_ids = torch.from_numpy(used)
        expected_logits = self.reference(tokens)
        expected = F.cross_entropy(expected_logits, labels, reduction="sum") / num_tokens
        expected.backward()

        is_mixed_ML = self._mixed(ids_TLK, micro_step_T, rank_T, num_micro_steps)
        with mock.patch.object(step_planner, "plan_schedule", self.random_plans), random_slices(self.delay):
            report = session.plan_micro_steps([ids_TLK[rows] for rows in rows_M])
            assert report.mixed_instances == is_mixed_ML.sum()
            steps = [session.micro_step(m, may_deviate=case.deviates) for m in range(num_micro_steps)]
            if case.complete:
                for step, rows in zip(steps, rows_M, strict=True):
                    with torch.no_grad(), step:
                        self._choose(rows)
                        error = relative_error(self.model(tokens[rows]), expected_logits[rows])
                        assert error < TOLERANCE, (case, "recompute")
                num_exchanged = is_mixed_ML.size if case.deviates else is_mixed_ML.sum()
                assert self._take_metrics()["moe/mixed_instances"] == num_exchanged
                assert session.complete_plan().mixed_instances == 0
                steps = [session.micro_step(m, may_deviate=case.deviates) for m in range(num_micro_steps)]
        loss = self.run_schedule(steps, rows_M, tokens, labels, expected_logits)
        mixed = self._take_metrics()["moe/mixed_instances"]
        if not case.deviates:
            assert mixed == 0 if case.complete or not is_mixed_ML.any() else mixed >= is_mixed_ML.sum()
        session.finish_gradients(self.model.replicated())
        dist.all_reduce(loss)
        assert relative_error(loss, expected.detach()) < TOLERANCE, (case, "loss")
        for name, actual, whole, mine_of in matches(self.model, self.reference):
            assert actual.grad is not None
            assert whole.grad is not None
            assert relative_error(actual.grad, whole.grad[mine_of]) < TOLERANCE, (case, name, "gradient")
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = session.logical_state_dict(self.model)
        for name, wanted in self.reference.state_dict().items():
            assert relative_error(state[name], wanted) < TOLERANCE, (case, name, "weights")

    def _choose(self, rows: Array) -> None:
        """Let the model use the case's other ids for these tokens, in forwards from now on."""
        if self.case.deviates:
            layers = range(self.shape.layers)
            self.model.chosen_ids = [torch.from_numpy(self.chosen_ids[rows, layer]) for layer in layers]

    def _take_metrics(self) -> dict[str, float]:
        metrics = self.session.take_metrics()
        self.metrics.update(metrics)
        return metrics

    def run_schedule(
        self,
        steps: Sequence[MicroStep],
        rows_M: Sequence[Array],
        tokens: torch.Tensor,
        labels: torch.Tensor,
        expected_logits: torch.Tensor,
    ) -> torch.Tensor:
        """Forward and backward of all micro-steps in the case's order, chunk by chunk."""
        case, layers, num_tokens = self.case, self.shape.layers, len(tokens)
        cuts = [0, layers] if case.order != "interleaved" else [0, layers // 2, layers]
        chunks = len(cuts) - 1
        entered: dict[tuple[int, int], torch.Tensor] = {}
        left: dict[tuple[int, int], torch.Tensor] = {}
        total = torch.zeros((), dtype=torch.float64)
        for kind, m, chunk in events(case.order, len(steps), chunks, warm_up=2):
            rows = rows_M[m]
            if kind == "forward":
                with steps[m]:
                    self._choose(rows)
                    if chunk == 0:
                        x = self.model.embed(tokens[rows])
                    else:
                        x = entered[m, chunk] = left[m, chunk - 1].detach().requires_grad_()
                    x = self.model.run(x, cuts[chunk], cuts[chunk + 1])
                    if chunk == chunks - 1:
                        logits = self.model.head(x)
                        assert relative_error(logits, expected_logits[rows]) < TOLERANCE, (case, "logits")
                        x = F.cross_entropy(logits, labels[rows], reduction="sum") / num_tokens
                        total += x.detach()
                    left[m, chunk] = x
            elif chunk == chunks - 1:
                left.pop((m, chunk)).backward()
            else:
                left.pop((m, chunk)).backward(entered.pop((m, chunk + 1)).grad)
        return total

    def random_plans(
        self, loads: StepLoads, schedule: Schedule, placement: Placement, _cluster: Any, **chosen: Any
    ) -> PlannedStep:
        """Replaces the planner on the first rank of each group."""
        topology = self.session.topology
        if chosen["may_move"]:
            placement = random_placement(self.home_rng, self.shape.layers, self.shape.experts, topology.num_ranks)
        plans = tuple(
            random_plan(
                self.plan_rng, load, part, slots=self.session.slots_per_rank, placement=placement,
                ranks_per_node=topology.ranks_per_node,
            )
            for part, load in zip(loads.schedules, all_counts(loads), strict=True)
        )  # fmt: skip
        planned = PlannedStep(schedule, plans, NOTHING, {"nothing": 1.0}, dict.fromkeys(PARTS, 1.0))
        if not self.case.slices or not chosen["sliced"]:
            return planned
        return as_header(planned, slots=self.session.slots_per_rank, waits=self.case.slices in ("in time", "fails"))

    def _mixed(self, ids_TLK: Array, micro_step_T: Array, rank_T: Array, num_micro_steps: int) -> Array:
        """`[M, L]` instances of this rank's group that have unknown rows."""
        of_group_T = rank_T // self.session.num_ranks == self.session.topology.group
        is_unknown_TL = (ids_TLK[:, :, 0] < 0) & of_group_T[:, None]
        return np.stack([is_unknown_TL[micro_step_T == m].any(axis=0) for m in range(num_micro_steps)])
