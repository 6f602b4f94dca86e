"""`Loop`: a model in a session, the whole model, and what has happened to both; and their comparison."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers.equality import relative_error
from helpers.moe_model import WITHOUT_CHECKPOINTS, TinyMoE, matches
from helpers.planned_steps import rows_of
from trimtab.planner import Schedule
from trimtab.runtime import Session
from trimtab.trace import RoutingTrace

MICRO_STEPS = 3
# Ways to run a block, see `TinyMoE`.
RUNS = (
    "plain", "checkpoint", "checkpoint without early stop", "reentrant checkpoint", "nested checkpoint",
    "nested reentrant checkpoint", "checkpointed experts", "reentrantly checkpointed experts",
)  # fmt: skip
# Recorded rows of a trace.
ROWS = "known", "some unknown", "some with an id twice", "some unread"
TOLERANCE = 1e-12


class ExpectedError(Exception):
    """Raised by a test inside the model."""


class Changes(NamedTuple):
    """How many plans were applied, how often weights changed and optimizers stepped."""

    plans: int = 0
    weights: int = 0
    steps: int = 0


class Pending(NamedTuple):
    """A forward whose backward has not run, and the changes before it."""

    loss: torch.Tensor
    expected: torch.Tensor
    changes: Changes
    is_planned: bool


@dataclass(eq=False)
class Loop:
    """The state of one rank.

    Attributes:
        unread_T: `[T]` bool, tokens of the trace whose output is not used.
        frozen_before: whether nothing before the first experts is trained.
        writes: how often `write` changed the weights.
        pending: forwards whose backward has not run, by number.
        is_finished: whether gradients are complete.
        has_mixed_gradients: whether gradients were added to others that had been summed over ranks.
        offloaded_parameters: the parameters' values while they are offloaded; else None.
        averages: of the weights, by the names of the model's and of the reference's parameters.
        has_stepped: whether the model's optimizer has.
        saved: state dicts of the model and its optimizer, of the reference and its, and the model's weights in order of
            experts; None if there are none.
        on_threads, thread: whether actions run on short-lived threads, and the present one.
    """

    session: Session
    model: TinyMoE
    reference: TinyMoE
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer]
    slots: int
    frozen_before: bool = False
    trace: RoutingTrace = field(init=False)
    schedule: Schedule = field(init=False)
    unread_T: np.ndarray = field(init=False)
    tokens: torch.Tensor = field(init=False)
    labels: torch.Tensor = field(init=False)
    changes: Changes = field(default_factory=Changes)
    writes: int = 0
    pending: dict[int, Pending] = field(default_factory=dict)
    is_finished: bool = False
    has_mixed_gradients: bool = False
    offloaded_parameters: list[torch.Tensor] | None = None
    has_stepped: bool = False
    averages: tuple[dict[str, torch.Tensor], ...] = ()
    saved: tuple[dict[str, Any], ...] | None = None
    on_threads: bool = False
    thread: ThreadPoolExecutor | None = None

    def may_run(self, run: str) -> str:
        """The way to run a block: a reentrant checkpoint has no gradients if its inputs need none."""
        return run.replace("reentrantly ", "").replace("reentrant ", "") if self.frozen_before else run

    def rows(self, index: int, rank: int | None = None) -> torch.Tensor:
        """The tokens of a micro-step, of one rank or all."""
        chosen = self.schedule.micro_step == index
        if rank is not None:
            chosen = chosen & (self.schedule.rank == rank)
        return rows_of(self.trace, np.flatnonzero(chosen))

    def loss(
        self, model: TinyMoE, rows: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of the tokens that are read, and their logits. The model gets them at these positions, among others."""
        batch = self.tokens[rows]
        if positions is not None:
            batch = torch.zeros(len(rows) + 3, dtype=batch.dtype).index_copy(0, positions, batch)
        is_read, logits = torch.from_numpy(~self.unread_T[rows.numpy()]), model(batch)
        logits = logits if positions is None else logits[positions]
        logits, labels = logits[is_read], self.labels[rows][is_read]
        return F.cross_entropy(logits, labels, reduction="sum") / len(self.tokens), logits

    def recorded_ids(self) -> np.ndarray:
        """`[T, L, K]` int64, -1 where the route is unknown or has an id twice, or the token is not read."""
        ids = self.trace.expert_ids.astype(np.int64)
        is_unknown = (ids == self.trace.no_route).any(axis=2) | (np.diff(np.sort(ids)) == 0).any(axis=2)
        ids[is_unknown | self.unread_T[:, None]] = -1
        return ids

    def chosen_ids(self, seed: int) -> np.ndarray:
        """`[T, L, K]` int64, ids that some tokens get in place of the recorded ones; -1 for the others."""
        rng, recorded = np.random.default_rng(seed), self.recorded_ids()
        tokens, layers, top_k = recorded.shape
        chosen = np.argsort(rng.random((tokens, layers, self.session.num_experts)), axis=2)[:, :, :top_k]
        kind = rng.integers(0, 6, (tokens, layers))
        kind[(recorded[:, :, 0] < 0) & (kind < 2)] = 3
        # The same ids in another order; the last one replaced, perhaps by itself; all of them replaced.
        chosen[kind == 0] = recorded[kind == 0][:, ::-1]
        is_other = (kind == 1) & (chosen[:, :, -1:] != recorded[:, :, :-1]).all(axis=2)
        chosen[is_other, :-1] = recorded[is_other, :-1]
        chosen[(kind > 2) | self.unread_T[:, None]] = -1
        return chosen

    def expect(
        self,
        rows: torch.Tensor,
        run: str,
        skipped: frozenset[int],
        live: bool,
        chosen: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Loss and logits of the reference model for the same rows."""
        ids_TLK = self.recorded_ids()
        if chosen is not None:
            ids_TLK = np.where(chosen < 0, ids_TLK, chosen)
        self.reference.run_block, self.reference.skipped = WITHOUT_CHECKPOINTS.get(run, "plain"), skipped
        for layer, block in enumerate(self.reference.moe_blocks()):
            block.recorded_ids = None if live else torch.from_numpy(ids_TLK[rows.numpy(), layer])
        return self.loss(self.reference, rows)


Action = Callable[..., None]


def action(function: Action) -> Action:
    """What a loop can't do while its parameters are offloaded; nothing happens then. Results are compared after it."""

    @wraps(function)
    def act(loop: Loop, *args: Any) -> None:
        if loop.offloaded_parameters is None:
            function(loop, *args)
            compare(loop)

    return act


def has_gradients(model: TinyMoE) -> bool:
    """Whether any gradient is not zero."""
    return any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def zero_gradients(loop: Loop, to_none: bool) -> None:
    """Zero the gradients of both models, without a comparison."""
    for optimizer in loop.optimizers:
        optimizer.zero_grad(set_to_none=to_none)
    loop.is_finished = loop.has_mixed_gradients = False


def compare(loop: Loop) -> None:
    """Asserts that gradients, weights and optimizer state equal those of the reference."""
    if loop.offloaded_parameters is not None:
        return
    session = loop.session
    experts = {id(p) for layer in session.layers for p in layer.parameters}
    for name, actual, expected, mine in matches(loop.model, loop.reference):
        own, wanted = (torch.zeros_like(p) if p.grad is None else p.grad for p in (actual, expected))
        if id(actual) in experts:
            wanted = wanted[mine]
        elif loop.has_mixed_gradients:
            continue
        elif not loop.is_finished:
            own = own.clone()
            dist.all_reduce(own)
        assert relative_error(own, wanted) < 100 * TOLERANCE, (name, "gradient")
    weights = session.logical_state_dict(loop.model)
    for name, expected in loop.reference.state_dict().items():
        assert relative_error(weights[name], expected) < 100 * TOLERANCE, (name, "weights")
    names = {id(parameter): name for name, parameter in loop.reference.named_parameters()}
    for name, _, expected, mine in matches(loop.model, loop.reference):
        whole = loop.averages[1][names[id(expected)]]
        assert relative_error(loop.averages[0][name], whole[mine]) < 100 * TOLERANCE, (name, "average")
    states = dict(session.logical.optimizer_state(loop.model, loop.optimizers[1]))
    for name, expected in loop.reference.named_parameters() if session.rank == 0 else ():
        for key, value in loop.optimizers[0].state.get(expected, {}).items():
            own_value = states[name][key]
            assert isinstance(own_value, torch.Tensor)
            assert relative_error(own_value, value) < 100 * TOLERANCE, (name, key)
