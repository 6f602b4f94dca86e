"""`Loop`: a model in a session, the whole model on one process, what has happened to both, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

from helpers.equality import relative_error
from helpers.moe_model import WITHOUT_CHECKPOINTS, Shape, TinyMoE, matches
from helpers.plain_dispatch import PlainDispatcher
from helpers.planned_steps import rows_in
from helpers.random_slices import in_time
from helpers.rank_pool import scattered_groups
from trimtab.array_type import Array
from trimtab.planner import Schedule
from trimtab.runtime import MicroStep, Session
from trimtab.runtime.transfer.peer_memory import PeerMemory
from trimtab.trace import RoutingTrace

# Of a step.
SEQUENCES = 6
# Of clipping.
MAX_NORM = 0.05
# Ways to run a block, see `TinyMoE`.
RUNS = (
    "plain", "checkpoint", "checkpoint without early stop", "reentrant checkpoint", "nested checkpoint",
    "nested reentrant checkpoint", "checkpointed experts", "reentrantly checkpointed experts",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What a loop is made of, and what happens in it. Values of dimensions in `helpers.cases` set them.

    Attributes:
        world, groups, scattered: ranks, their expert-parallel groups, and whether these are given as process groups of
            random ranks, with nodes of random ranks.
        per_rank, top_k, lists, transposed: experts of a rank, of a token, as in `Shape`, and with rows that are not
            contiguous.
        dtype, compute_dtype, tolerance: of the model in the session, of its layers, and of results.
        rows: `known`; some `unknown`, with an id `twice`, `unread`, or that the model `deviates` from.
        completed: unknown routes are added to the plan after a recompute.
        planner: `random` plans; the session's `own`, or of `sequences` that it schedules; `micro-steps`, random plans
            of `plan_micro_steps`, with random slices that are `in time`, `late`, or whose planner `fails` or `stalls`
            on one rank in the first step.
        plain_dispatcher: dispatch with `PlainDispatcher`.
        sharded: dense parts are in FSDP2.
        frozen: `some layers`, `down` of all, all `experts`, or everything in `front` of them.
        sgd: SGD with clipping instead of AdamW.
        one_sided: replicas are pulled out of host memory of neighbours, as on CUDA.
        runs, checkpointed_function: how blocks run, in turn, and whether the function of the experts is checkpointed.
        padded: layers are given rows of no token, too.
        steps: optimizer steps.
        order, recomputes, repeats, event, between, threads, ways: see `helpers.programs`.
        settings: of the session.
    """

    world: int = 2
    groups: int = 1
    scattered: bool = False
    per_rank: int = 2
    top_k: int = 2
    lists: tuple[str, ...] = ()
    transposed: bool = False
    dtype: torch.dtype = torch.float64
    compute_dtype: torch.dtype | None = None
    tolerance: float = 1e-12
    rows: str = "known"
    completed: bool = False
    planner: str = "random"
    plain_dispatcher: bool = False
    sharded: bool = False
    frozen: str = ""
    sgd: bool = False
    one_sided: bool = False
    runs: tuple[str, ...] = ("plain",)
    checkpointed_function: bool = False
    padded: bool = False
    steps: int = 2
    order: str = "one by one"
    recomputes: str = ""
    repeats: str = ""
    event: str = ""
    between: str = ""
    threads: str = ""
    ways: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **options: Any) -> Options:
        """Options, of which those that have no field are the session's."""
        own = {each.name for each in fields(cls)}
        settings = {name: value for name, value in options.items() if name not in own}
        return cls(settings=settings, **{name: value for name, value in options.items() if name in own})

    @property
    def mode(self) -> str:
        """The session's."""
        return self.settings.get("mode", "plan")


class ExpectedError(Exception):
    """Raised by a test inside the model."""


class Changes(NamedTuple):
    """How many plans were applied, how often weights changed and optimizers stepped."""

    plans: int = 0
    weights: int = 0
    steps: int = 0


@dataclass(eq=False)
class Pending:
    """A forward whose backward has not run, and the changes before it.

    Attributes:
        loss, expected: of the model's last chunk, and of the whole model.
        cuts: what left a chunk, and what entered the next one.
    """

    changes: Changes
    is_planned: bool
    cuts: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    expected: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    left: torch.Tensor | None = None


@dataclass(eq=False)
class Loop:
    """The state of one rank.

    Attributes:
        trace, schedule, tokens, labels: of the present step.
        kind: of its rows, as `Options.rows`.
        unread_T: `[T]` bool, tokens of the trace whose output is not used.
        compares: whether everything is compared after each action.
        writes: how often `write` changed the weights.
        pending: forwards whose backward has not run, by number.
        is_finished: whether gradients are complete.
        has_mixed_gradients: whether gradients were added to others that had been summed over ranks.
        offloaded_parameters: the parameters' values while they are offloaded; else None.
        averages: of the weights, by the names of the model's and of the reference's parameters.
        has_stepped: whether the model's optimizer has.
        saved: state dicts of the model and its optimizer, of the reference and its, and the model's weights in order of
            experts; None if there are none.
        told: the session that tells of new ids.
        delay: of the planner's rounds, see `helpers.random_slices`.
        done: the actions so far.
        kept: what queued work may read.
    """

    options: Options
    seed: int
    session: Session
    model: TinyMoE
    reference: TinyMoE
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer]
    compares: bool = True
    kind: str = "known"
    trace: RoutingTrace = field(init=False)
    schedule: Schedule = field(init=False)
    unread_T: Array = field(init=False)
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
    told: Session | None = None
    delay: Callable[[range], None] = in_time
    done: list[str] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)

    @property
    def data_rank(self) -> int:
        """This rank's number in schedules."""
        return self.session.topology.data_rank

    @property
    def is_live(self) -> bool:
        """Whether layers are balanced without a plan."""
        return self.session.mode == "live"

    @property
    def is_carried_out(self) -> bool:
        """Whether plans are executed."""
        return self.session.mode in ("plan", "static")

    @property
    def is_planned(self) -> bool:
        """Whether all rows and replicas of the step are planned before it, and the plan is executed."""
        return self.is_carried_out and self.kind == "known" and self.options.planner == "random"

    @property
    def may_wait(self) -> bool:
        """Whether the host may wait for a device in layers: where counts are not planned, and in `grouped_mm` of a CPU,
        which does not multiply float64."""
        return not self.is_planned or self.options.tolerance > 1e-9 or self.options.sharded

    def dense(self) -> Iterator[torch.nn.Parameter]:
        """Parameters that every rank has, some of them twice."""
        if self.options.sharded:
            yield from self.session.replicated_parameters(self.model)
        else:
            yield from [*self.model.replicated(), *self.model.head.parameters()]

    def micro_step(self, index: int, **arguments: Any) -> MicroStep:
        """The context of a micro-step in the session's mode."""
        if self.is_live:
            return self.session.live_micro_step(positions=arguments.get("positions"))
        return self.session.micro_step(index, **arguments)

    def may_run(self, run: str) -> str:
        """The way to run a block: a reentrant checkpoint has no gradients if its inputs need none."""
        return run.replace("reentrantly ", "").replace("reentrant ", "") if self.options.frozen == "front" else run

    @property
    def micro_steps(self) -> list[int]:
        """Numbers of the present step's micro-steps."""
        return [*range(self.schedule.num_micro_steps)]

    def rows(self, index: int, rank: int | None = None) -> torch.Tensor:
        """The tokens of a micro-step, of one data rank or all."""
        return rows_in(self.trace, self.schedule, index, rank)

    def batch(self, rows: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens, at these positions of a longer batch."""
        batch = self.tokens[rows]
        if positions is None:
            return batch
        return torch.zeros(len(rows) + 3, dtype=batch.dtype).index_copy(0, positions, batch)

    def loss_of(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of the tokens that are read, and their logits."""
        is_read = torch.from_numpy(~self.unread_T[rows.numpy()])
        logits = (logits if positions is None else logits[positions])[is_read]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, self.labels[rows][is_read], reduction="sum") / len(self.tokens), logits

    def loss(self, model: TinyMoE, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `loss_of`, of a forward of the model."""
        return self.loss_of(model(self.tokens[rows]), rows)

    def recorded_ids(self) -> Array:
        """`[T, L, K]` int64, -1 where the route is unknown or has an id twice, or the token is not read."""
        ids = self.trace.expert_ids.astype(np.int64)
        is_unknown = (ids == self.trace.no_route).any(axis=2) | (np.diff(np.sort(ids)) == 0).any(axis=2)
        ids[is_unknown | self.unread_T[:, None]] = -1
        return ids

    def chosen_ids(self, seed: int) -> Array:
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
        self, rows: torch.Tensor, run: str, skipped: frozenset[int] = frozenset(), *, live: bool,
        chosen: Array | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Loss and logits of the reference model for the same rows."""
        ids_TLK = self.recorded_ids()
        if chosen is not None:
            ids_TLK = np.where(chosen < 0, ids_TLK, chosen)
        self.reference.run_block, self.reference.skipped = WITHOUT_CHECKPOINTS.get(run, "plain"), skipped
        for layer, block in enumerate(self.reference.moe_blocks()):
            block.recorded_ids = None if live else torch.from_numpy(ids_TLK[rows.numpy(), layer])
        return self.loss(self.reference, rows)

    def error_of(self, actual: torch.Tensor, expected: torch.Tensor) -> float:
        """The error of a result, as a multiple of the tolerance."""
        whole: Any = actual
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        return relative_error(whole.to(expected.dtype), expected) / self.options.tolerance

    @property
    def most(self) -> float:
        """The largest error of gradients and weights."""
        return 100.0 if self.options.tolerance < 1e-3 else 3.0

    def compare(self) -> None:
        """Asserts that gradients, weights and optimizer state equal those of the reference."""
        if self.offloaded_parameters is not None:
            return
        session, most = self.session, self.most
        experts = {id(p) for layer in session.layers for p in layer.parameters}
        for name, actual, expected, mine in matches(self.model, self.reference):
            own, wanted = (torch.zeros_like(p) if p.grad is None else p.grad for p in (actual, expected))
            if id(actual) in experts:
                wanted = wanted[mine]
                if self.options.groups > 1 and not self.is_finished:
                    continue
            elif self.has_mixed_gradients:
                continue
            elif not self.is_finished and not hasattr(own, "full_tensor"):
                own = own.clone()
                dist.all_reduce(own)
            assert self.error_of(own, wanted) < most, (name, "gradient")
        weights = session.whole_state_dict(self.model)
        for name, expected in self.reference.state_dict().items():
            assert self.error_of(weights[name], expected) < most, (name, "weights")
        names = {id(parameter): name for name, parameter in self.reference.named_parameters()}
        for name, _, expected, mine in matches(self.model, self.reference):
            if name in self.averages[0]:
                whole = self.averages[1][names[id(expected)]]
                assert self.error_of(self.averages[0][name], whole[mine]) < most, (name, "average")
        if self.options.sharded or most < 100:
            return
        states = dict(session.whole.optimizer_state(self.model, self.optimizers[1]))
        for name, expected in self.reference.named_parameters() if dist.get_rank() == 0 and states else ():
            for key, value in self.optimizers[0].state.get(expected, {}).items():
                if isinstance(value, torch.Tensor):
                    found = states[name][key]
                    assert isinstance(found, torch.Tensor)
                    assert self.error_of(found, value) < most, (name, key)


Action = Callable[..., None]


def action(function: Action) -> Action:
    """What a loop can't do while its parameters are offloaded; nothing happens then. Results are compared after it."""

    @wraps(function)
    def act(loop: Loop, *args: Any, **named: Any) -> None:
        if loop.offloaded_parameters is None:
            function(loop, *args, **named)
            if loop.compares:
                loop.compare()

    return act


def has_gradients(model: TinyMoE) -> bool:
    """Whether any gradient is not zero."""
    return any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def zero_gradients(loop: Loop, to_none: bool = True) -> None:
    """Zero the gradients of both models, without a comparison."""
    for optimizer in loop.optimizers:
        optimizer.zero_grad(set_to_none=to_none)
    loop.is_finished = loop.has_mixed_gradients = False


def make_session(options: Options, seed: int, num_experts: int) -> Session:
    """The session of a loop."""
    rng, ranks = np.random.default_rng((seed, 1)), dist.get_world_size() // options.groups
    per_node = int(rng.choice([size for size in range(1, ranks + 1) if ranks % size == 0]))
    groups: dict[str, Any] = {"groups": options.groups, "ranks_per_node": per_node}
    if options.scattered:
        nodes = rng.permutation(ranks) // per_node
        groups = {**scattered_groups(options.groups, seed % 2), "nodes": nodes}
    return Session(
        **{
            "num_experts": num_experts, "slots_per_rank": int(rng.integers(1, 3)),
            "ring_layers": int(rng.integers(2, 5)), "least_gain": -1e9, **groups, **options.settings,
        }
    )  # fmt: skip


def make_loop(options: Options, seed: int) -> Loop:
    """A new model in a new session, without a plan."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    experts = dist.get_world_size() // options.groups * options.per_rank
    shape = Shape(
        layers=int(rng.integers(2, 4)), experts=experts, top_k=min(options.top_k, experts),
        hidden=int(rng.choice([4, 6, 16])), width=int(rng.choice([4, 5, 8])), lists=options.lists,
    )  # fmt: skip
    session = make_session(options, seed, experts)
    whole_dtype = torch.promote_types(options.dtype, torch.float32)
    reference, model = TinyMoE(shape, whole_dtype), TinyMoE(shape, options.dtype)
    for block in reference.moe_blocks() if session.mode == "live" else ():
        # A skewed router, so that there is something to balance.
        block.router.weight.data *= 4
    model.load_state_dict(reference.state_dict())
    reference.load_state_dict(model.state_dict())
    dispatcher = None
    if options.plain_dispatcher:
        dispatcher = PlainDispatcher(
            lambda: session.settings.expert_group or session.topology.experts, options.per_rank, session.slots_per_rank
        )
    for block in model.moe_blocks():
        block.is_read, block.compute_dtype = seed % 2 == 0, options.compute_dtype
        block.checkpoints_function = options.checkpointed_function
    model.share(session, dispatcher)
    if options.one_sided:
        session.transfers.ring.peers = PeerMemory.in_host_memory(session.topology, session.homes)
    for either in (reference, model):
        freeze(either, options.frozen)
    if options.transposed:
        for block in model.moe_blocks():
            for parameter in block.expert_parameters():
                parameter.data = parameter.data.mT.contiguous().mT
    for module in (model.embed, model.head) if options.sharded else ():
        fully_shard(module)  # type: ignore[call-overload]
        module.set_gradient_divide_factor(1.0)  # type: ignore[operator, union-attr]
        # Gloo can't multiply.
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator, union-attr]
    first, second = (make_optimizer(options, each) for each in (reference, model))
    session.register_optimizers(second)
    loop = Loop(options, seed, session, model, reference, (first, second))
    register_averages(loop)
    return loop


def register_averages(loop: Loop) -> None:
    """Averages of the weights, of a module or by name."""
    mine, whole = (
        {n: p.detach().clone() for n, p in each.named_parameters() if not hasattr(p, "full_tensor")}
        for each in (loop.model, loop.reference)
    )
    if loop.seed % 2 and not loop.options.sharded:
        mine = dict(AveragedModel(loop.model).module.named_parameters())
    loop.averages = (mine, whole)


def freeze(model: TinyMoE, frozen: str) -> None:
    """Parts of a model are not trained, see `Options.frozen`."""
    for layer, block in enumerate(model.moe_blocks()):
        for name in ("gate_up", "down"):
            if frozen == "experts" or (frozen == "some layers" and layer == 0) or frozen == name:
                getattr(block, name).requires_grad_(False)
    for module in (model.embed, model.mixes[0], model.moe_blocks()[0].router) if frozen == "front" else ():
        module.requires_grad_(False)


def make_optimizer(options: Options, model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer with rows of state. Its epsilon is large, since Adam divides by values that may be tiny."""
    if options.sgd:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.1, foreach=False)
