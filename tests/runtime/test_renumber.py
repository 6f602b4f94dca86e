"""`Session.renumber`: what is refused, on all ranks; the weights are a plain model's. Results: `test_cases`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.actions import STALE, forward, live, step, update
from helpers.equality import relative_error
from helpers.plans import start
from helpers.rank_tests import runs_on_ranks
from helpers.tiny_training import saved
from trimtab import InputError
from trimtab.array_type import Array
from trimtab.errors import RanksDisagreeError
from trimtab.runtime import Session, gated_experts
from trimtab.trace import RoutingTrace
from trimtab.trace.numbering import Numbering, random_orders


def some_order(session: Any, seed: int = 5) -> Array:
    return random_orders(len(session.layers), session.num_experts, seed)


@runs_on_ranks()
def test_the_whole_model_is_that_of_other_ids() -> None:
    """A plain process loads it, and computes what the session computed before."""
    loop = start()
    update(loop)
    session, order_LE = loop.session, some_order(loop.session)
    before = {name: value.clone() for name, value in session.whole_state_dict(loop.model).items()}
    told: list[tuple[int, list[int]]] = []
    session.on_renumber(lambda layer, order_E: told.append((layer, order_E.tolist())))
    loop.model.zero_grad()
    session.renumber(order_LE)
    assert told == [(layer, order_E.tolist()) for layer, order_E in enumerate(order_LE)]
    assert np.array_equal(session.home_experts, session.layers[0].home_experts)
    after = session.whole_state_dict(loop.model)
    for layer, order_E in enumerate(order_LE):
        for name in ("router.weight", "gate_up", "down"):
            key = f"blocks.{layer}.{name}"
            assert torch.equal(after[key], before[key][torch.from_numpy(order_E)])
    tokens, logits = torch.arange(11), []
    for block in loop.reference.moe_blocks():
        block.recorded_ids = None
    for state in (before, after):
        loop.reference.load_state_dict(state)
        logits.append(loop.reference(tokens))
    assert relative_error(logits[1], logits[0]) < 1e-12


@runs_on_ranks()
def test_what_is_not_known_is_refused_by_name() -> None:
    loop = start()
    update(loop)
    loop.model.zero_grad()
    session, order_LE = loop.session, some_order(loop.session)
    block, homes = loop.model.moe_blocks()[0], session.homes[0]
    for order, message in ((order_LE[:, :-1], "it should have"), (order_LE * 0, "in another order")):
        with pytest.raises(InputError, match=message):
            session.renumber(order)
    declared, homes.by_expert = homes.by_expert, None
    with pytest.raises(InputError, match="layer 0 can't be renumbered: nothing says what its router"):
        session.renumber(order_LE)
    homes.by_expert, block.router.weight = [block.router.weight], torch.nn.Parameter(block.router.weight.detach())
    with pytest.raises(InputError, match="'weight' of Linear has been replaced in the model"):
        session.renumber(order_LE)
    homes.by_expert = [torch.zeros(3)]
    with pytest.raises(InputError, match=r"by_expert has a tensor of shape \[3\]"):
        session.renumber(order_LE)
    homes.by_expert = declared
    weight = block.router.weight
    weight.grad = torch.full_like(weight, float(session.rank))
    with pytest.raises((RuntimeError, RanksDisagreeError), match="gradients that wait"):
        session.renumber(order_LE)
    weight.grad = None
    other = torch.optim.Adafactor([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    other.step()
    weight.grad = None
    with pytest.raises(InputError, match="Adafactor keeps 'col_var' of a router's tensor"):
        session.renumber(order_LE)
    other.state.clear()
    with pytest.raises(InputError, match="different numbers"):
        session.renumber(order_LE, decoder_layers=[3, 3, *range(len(order_LE) - 2)])
    with pytest.raises(RanksDisagreeError):
        session.renumber(some_order(session, seed=session.rank))
    session.renumber(order_LE)


@runs_on_ranks()
def test_ids_without_a_numbering_are_refused_after_a_renumbering() -> None:
    loop = start()
    session, mine = loop.session, loop.trace.select(loop.schedule.sequences_of(loop.data_rank))
    with pytest.raises(InputError, match=r"set session\.numbering"):
        session.plan(
            replace(mine, numbering=Numbering({0: tuple(np.roll(range(session.num_experts), 1))})), loop.schedule
        )
    layers = np.arange(len(session.layers)) + 3
    session.renumber(some_order(session), decoder_layers=layers)
    for plan in (
        lambda: session.plan(mine, loop.schedule),
        lambda: session.plan_sequences(mine, token_budget=64),
        lambda: session.plan_micro_steps([mine.expert_ids.astype(np.int64)]),
    ):
        with pytest.raises(InputError, match="does not say which ids recorded it"):
            plan()
    tagged = replace(mine, numbering=session.numbering)
    with pytest.raises(InputError, match="the session was renumbered with"):
        session.plan(tagged, loop.schedule)
    with pytest.raises(InputError, match="in this session"):
        session.renumber(some_order(session), decoder_layers=range(len(layers)))
    session.plan(replace(tagged, layer_indices=layers.astype(np.int32)), loop.schedule)
    # The order of the start is first ids again.
    session.renumber(np.argsort(some_order(session), axis=1), decoder_layers=layers)
    assert session.numbering == Numbering()


@runs_on_ranks()
def test_renumbering_ends_the_plan() -> None:
    loop = start()
    forward(loop, 0, number=1)
    live(loop, 0, number=2)
    loop.session.renumber(some_order(loop.session))
    with pytest.raises(RuntimeError, match="plan"), loop.session.micro_step(0):
        pass
    for pending in loop.pending.values():
        with pytest.raises(RuntimeError, match=STALE):
            pending.loss.backward()
    dist.barrier()


@runs_on_ranks()
def test_the_planner_chooses_an_order_that_evens_out_its_step() -> None:
    torch.manual_seed(0)
    session = Session(num_experts=8, slots_per_rank=0)
    router = torch.nn.Linear(64, 8, bias=False)
    stacks = [torch.nn.Parameter(torch.randn(4, *shape)) for shape in ((512, 64), (64, 256))]
    session.add_layer(stacks, gated_experts(), by_expert=[router.weight])
    with pytest.raises(RuntimeError, match="needs a step that this session has planned"):
        session.renumber()
    # Of two ranks, the first has all hot experts.
    ids = np.random.default_rng(session.rank).choice(8, (4000, 1, 1), p=[0.22] * 4 + [0.03] * 4)
    before = session.plan_micro_steps([ids])
    with pytest.raises(InputError, match="needs the optimizers"):
        session.renumber()
    session.register_optimizers(torch.optim.SGD(stacks, lr=0.1))
    assert session.renumber()
    again = session.plan_micro_steps([ids], numbering=Numbering())
    assert before.max_vio_before > 0.5
    assert again.max_vio_before < 0.1
    assert not session.renumber()


@runs_on_ranks()
def test_old_weights_replay_recorded_ids_in_their_own_numbering() -> None:
    """As slime's `keep_old_actor`: the weights of a rollout stand in for those of now, and replay its ids."""
    loop = start()
    session, tokens = loop.session, loop.rows(0, loop.data_rank)
    mine = replace(loop.trace.select(loop.schedule.sequences_of(loop.data_rank)), numbering=Numbering())

    def log_probs() -> torch.Tensor:
        session.plan(mine, loop.schedule)
        with torch.no_grad(), session.micro_step(0):
            found: torch.Tensor = loop.model(loop.tokens[tokens]).log_softmax(1)
        return found

    def load(state: dict[str, torch.Tensor], numbering: Numbering | None) -> None:
        loop.model.load_state_dict(state)
        session.numbering = numbering

    old, first = saved(loop.model), Numbering()
    expected = log_probs()
    session.renumber(some_order(session))
    assert relative_error(log_probs(), expected) < 1e-12
    now, numbering = saved(loop.model), session.numbering
    load(old, first)
    with pytest.raises(RuntimeError, match="planned for weights of another numbering"), session.micro_step(0):
        pass
    assert relative_error(log_probs(), expected) < 1e-12
    load(now, numbering)
    assert relative_error(log_probs(), expected) < 1e-12
    # Another session of these experts knows their ids, too.
    other = Session(num_experts=session.num_experts)
    for block in loop.model.moe_blocks():
        block.run_in(other)
    assert other.numbering == numbering
    assert other.decoder_layers is not None
    assert np.array_equal(other.decoder_layers, np.arange(len(session.layers)))


@runs_on_ranks()
def test_parts_of_a_response_from_before_and_after_are_mapped_apart() -> None:
    """As windows of T-PPO have them."""
    loop = start()
    session, mine = loop.session, loop.trace.select(loop.schedule.sequences_of(loop.data_rank))
    session.renumber(some_order(session))
    assert session.numbering is not None
    now = replace(mine, numbering=Numbering()).in_numbering(session.numbering)
    joined = []
    for index in range(mine.num_sequences):
        rows, known = mine.sequence(index), len(mine.sequence(index)) // 2
        before = replace(
            RoutingTrace.from_sequences([rows[:known]], num_experts=mine.num_experts), numbering=Numbering()
        )
        joined.append(np.concatenate([before.in_numbering(session.numbering).expert_ids, now.sequence(index)[known:]]))
    trace = RoutingTrace.from_sequences(joined, num_experts=mine.num_experts)
    assert np.array_equal(trace.expert_ids, now.expert_ids)
    session.plan(replace(trace, numbering=session.numbering), loop.schedule)
    tokens = loop.rows(0, loop.data_rank)
    with torch.no_grad(), session.micro_step(0):
        logits = loop.model(loop.tokens[tokens])
    _, expected = loop.expect(tokens, "plain", live=False)
    assert relative_error(logits, expected) < 1e-12


class Wrapped(torch.optim.Optimizer):
    """As Accelerate's: an optimizer with the state of another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state


@runs_on_ranks()
def test_state_of_a_wrapped_optimizer_is_permuted_once() -> None:
    loop = start()
    update(loop)
    step(loop)
    loop.model.zero_grad()
    wrapped, router = Wrapped(loop.optimizers[1]), loop.model.moe_blocks()[0].router.weight
    before, order_LE = wrapped.state[router]["exp_avg"].clone(), some_order(loop.session)
    assert loop.session.renumber(order_LE)
    assert torch.equal(wrapped.state[router]["exp_avg"], before[torch.from_numpy(order_LE[0])])


@runs_on_ranks()
def test_a_plan_for_other_weights_is_not_completed() -> None:
    loop = start()
    session, mine = loop.session, loop.trace.select(loop.schedule.sequences_of(loop.data_rank))
    first = Numbering()
    session.numbering = first
    session.plan(replace(mine, numbering=first), loop.schedule)
    session.numbering = first.then(some_order(session), np.arange(len(session.layers)))
    for call in (session.complete_plan, session.renumber):
        with pytest.raises(RuntimeError, match="was planned for weights of another numbering"):
            call()
    # Ids as they are leave everything as it is.
    session.numbering = None
    session.plan(mine, loop.schedule)
    assert not session.renumber([np.arange(session.num_experts)] * len(session.layers))
    assert session.numbering is None
    with session.micro_step(0):
        pass


@runs_on_ranks(4)
def test_homes_that_the_planner_keeps_are_no_order_on_nodes_of_any_ranks() -> None:
    """Ids are contiguous in the order of the framework's group, not in that of nodes."""
    session = Session(num_experts=8, slots_per_rank=0, expert_group=dist.group.WORLD, nodes=[0, 1, 0, 1])
    stacks = [torch.nn.Parameter(torch.randn(2, *shape)) for shape in ((8, 4), (4, 4))]
    session.add_layer(stacks, gated_experts(), by_expert=[])
    session.register_optimizers(torch.optim.SGD(stacks, lr=0.1))
    session.plan_micro_steps([np.arange(64).reshape(-1, 1, 1) % 8])
    assert not session.renumber()
    assert session.numbering is None
