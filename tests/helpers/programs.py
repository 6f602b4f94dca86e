"""What happens in the loop of a case: steps in an order of pipelines with something between, or any actions."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from helpers import actions, plans, user_actions
from helpers.actions import backward, finish, forward, step
from helpers.cases import Case
from helpers.loop import RUNS, Loop, Options, make_loop, register_averages
from helpers.plans import plan
from helpers.random_choices import quotas_of_few, random_moves, random_quotas
from helpers.random_slices import RELEASE, fails, in_time, random_delay, stalls
from helpers.rank_pool import on_ranks
from trimtab.runtime.live import balancer
from trimtab.trace.numbering import Numbering

ACTIONS = 30
Call = Callable[..., None]


def run(case: Case) -> list[dict[str, float]]:
    """Assert that a case equals one process. Returns the sessions' metrics by rank."""
    options, folder = case.options, tempfile.mkdtemp()
    try:
        metrics = on_ranks(run_on_rank, (str(case), folder), ranks=options.world, ways=options.ways)
        if options.between == "other ranks":
            on_ranks(run_on_rank, (str(case), folder, True), ranks=other_ranks(options).world, ways=options.ways)
        return metrics
    finally:
        shutil.rmtree(folder)


def other_ranks(options: Options) -> Options:
    """The same experts on another number of ranks."""
    experts = options.world // options.groups * options.per_rank
    other = next(n for n in (4, 3, 2, 1) if n != options.world and experts % n == 0)
    return replace(options, world=other, groups=1, scattered=False, per_rank=experts // other)


def run_on_rank(
    line: str, folder: str = "", goes_on: bool = False, others: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, float]:
    """A case on a rank, or its end on other ranks. Returns the session's metrics.

    Args:
        others: options instead of those of the case's values.
    """
    case = Case.parse(line)
    options = case.options_with(**others)
    options = other_ranks(options) if goes_on else options
    with random_live_choices(case.seed), slow_planners(options, case.seed) as delay:
        loop = make_loop(options, case.seed)
        loop.compares, loop.delay = options.order == "any", delay
        try:
            program = Program(loop, Path(folder), np.random.default_rng((case.seed, 2 + goes_on)))
            if goes_on:
                program.load()
            program.run()
            metrics = loop.session.take_metrics()
            if options.between == "other ranks" and not goes_on:
                program.store()
        except BaseException as error:
            error.add_note(f"{case}; done: {', '.join(loop.done)}")
            raise
        loop.session.close()
    return metrics


@contextmanager
def random_live_choices(seed: int) -> Iterator[None]:
    """Few tokens are enough for a live replica; or replicas are drawn at random."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balancer, "choose_quotas", random_quotas if seed % 2 else quotas_of_few)
        if seed % 2:
            patch.setattr(balancer, "choose_moves", random_moves)
        yield


@contextmanager
def slow_planners(options: Options, seed: int) -> Iterator[Callable[[range], None]]:
    """Yields what each round of this rank's planner waits for."""
    RELEASE.clear()
    is_broken = dist.get_rank() == 1
    yield {
        "late": random_delay((seed, dist.get_rank())),
        "fails": fails if is_broken else in_time,
        "stalls": stalls if is_broken else in_time,
    }.get(options.planner, in_time)
    RELEASE.set()


class Program:
    """The steps of one rank. All ranks draw the same."""

    def __init__(self, loop: Loop, folder: Path, rng: np.random.Generator) -> None:
        self.loop, self.options, self.folder, self.rng = loop, loop.options, folder, rng
        self.number = 0
        self.backwards = ThreadPoolExecutor(1) if self.options.threads == "backwards" else None

    def do(self, call: Call, *args: Any, **named: Any) -> None:
        """An action of the loop, which is noted."""
        self.loop.done.append(f"{call.__name__}{args or ''}{named or ''}")
        if self.backwards is not None and call is backward:
            self.backwards.submit(call, self.loop, *args, **named).result()
        else:
            call(self.loop, *args, **named)

    def run(self) -> None:
        """The whole program."""
        parts: list[Call] = [self.walk] if self.options.order == "any" else [self.step] * self.options.steps
        for part in parts:
            if self.options.threads == "steps":
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(part).result()
            else:
                part()

    def seed(self) -> int:
        """The next random number."""
        return int(self.rng.integers(1 << 20))

    def next_run(self) -> str:
        """How the next blocks run."""
        # Nested blocks compute something else, so that routers choose other experts.
        self.number += not self.options.completed
        return self.options.runs[self.number % len(self.options.runs)]

    def step(self) -> None:
        """An optimizer step over a planned step, and what comes after it."""
        options, loop, rng = self.options, self.loop, self.rng
        with torch.inference_mode() if options.recomputes == "inference" else nullcontext():
            self.do(plan, self.seed())
        if options.planner in ("fails", "stalls"):
            loop.delay = in_time
        named: dict[str, Any] = {"padded": options.padded}
        if options.rows == "deviates":
            named["deviates"] = self.seed()
        if options.recomputes or options.completed:
            for index in rng.permutation(loop.micro_steps).tolist():
                self.do(forward, index, self.next_run(), inference=options.recomputes == "inference", **named)
        if options.completed:
            assert loop.session.complete_plan().mixed_instances == 0
        events = [*in_order(options.order, rng.permutation(loop.micro_steps).tolist())]
        if options.repeats == "forwards":
            events = [(kind, index, chunk, again) for kind, index, chunk, _ in events for again in (0, 1)]
        # Not while only some chunks of a backward have run.
        first = next(place for place, event in enumerate(events) if event[0] == "backward")
        places = [*range(first + 1), len(events)] if options.order == "interleaved" else range(len(events) + 1)
        # Gradients of dense parameters before the first forward may be those of the last step.
        at, runs = self.draw(*places[options.event == "one rank" :]), dict[int, str]()
        for place, (kind, index, chunk, again) in enumerate(events):
            if place == at:
                self.event()
            number, chunks = 2 * index + again, 2 if options.order == "interleaved" else 1
            run = runs.setdefault(number, self.next_run())
            if kind == "forward":
                self.do(forward, index, run, number, chunk=(chunk, chunks), **named)
            else:
                self.do(backward, number, options.repeats == "backwards" and chunks == 1, chunk)
        if at == len(events):
            self.event()
        self.do(finish)
        loop.compare()
        self.do(step)
        loop.compare()
        self.between()
        loop.compare()

    def event(self) -> None:
        """Something in the midst of an accumulation."""
        match self.options.event:
            case "live":
                self.do(actions.live, self.seed(), self.next_run(), 100)
                self.do(backward, 100)
            case "one rank":
                self.do(actions.touch, self.seed())
            case "zero":
                self.do(actions.zero, bool(self.rng.integers(2)))
            case "forward fails":
                self.do(actions.fail, self.draw(*self.loop.micro_steps), self.next_run(), 0, "forward")
            case "backward fails":
                where = self.draw("inside", "outside")
                self.do(actions.fail, self.draw(*self.loop.micro_steps), self.next_run(), 0, where)

    def between(self) -> None:
        """Something between two steps, before another plan."""
        seed = self.seed()
        match self.options.between:
            case "suspend":
                self.do(plans.suspend, seed)
            case "renumber":
                self.do(plans.renumber, seed)
            case "reload" if self.loop.saved is None:
                self.do(user_actions.save)
            case "reload":
                self.do(user_actions.reload, seed)
            case "distributed checkpoint":
                self.do(user_actions.save_distributed)
            case "other session":
                self.do(user_actions.change_session, seed)
            case "other optimizer":
                self.do(user_actions.change_optimizer, seed, bool(self.loop.seed % 2))
            case "other memory":
                self.do(
                    user_actions.offload if self.options.ways in ("", "thread") and seed % 2 else user_actions.repoint
                )
                self.do(forward, 0)
                self.do(user_actions.onload)
            case "write":
                self.do(user_actions.write, "data" if seed % 2 else "tensor")
            case "other weights":
                self.do(user_actions.run_other_weights, seed)

    def walk(self) -> None:
        """Any actions."""
        self.do(plan, self.seed())
        rules = [rule for name in dir(self) if (rule := getattr(self, name)) and name.startswith("any_")]
        for _ in range(ACTIONS):
            rules[int(self.rng.integers(len(rules)))]()
        self.do(user_actions.onload)

    def draw(self, *values: Any) -> Any:
        """One of some values."""
        return values[int(self.rng.integers(len(values)))]

    def any_forward(self) -> None:
        """Forward, perhaps with its backward at once, or without gradients."""
        for _ in range(2):
            kind = self.draw("pending", "pending", "at once", "none", "inference")
            self.do(
                forward, self.draw(*self.loop.micro_steps), self.draw(*RUNS),
                self.number if kind in ("pending", "at once") else None, kind == "at once",
                self.draw(frozenset(), frozenset({self.draw(0, 1, 2)})) if kind == "pending" else frozenset(),
                kind == "inference", self.draw(None, self.seed()), self.draw(False, True) and kind != "inference",
            )  # fmt: skip
            self.number += 1

    def any_backward(self) -> None:
        """Of any pending forward."""
        for _ in range(2):
            if self.loop.pending:
                self.do(backward, self.draw(*self.loop.pending), self.draw(False, True))

    def any_plan(self) -> None:
        """In another mode, too, unless micro-steps are live."""
        modes = [self.options.mode, *([] if self.loop.is_live else ["plan", "plan", "static", "shadow", "off"])]
        rows = self.draw(self.options.rows, *([] if self.loop.is_live else ["known", "unknown", "twice", "unread"]))
        self.do(plan, self.seed(), self.draw(*modes), rows)

    def any_live(self) -> None:
        """Outside micro-steps."""
        self.number += 1
        self.do(actions.live, self.seed(), self.draw(*RUNS), self.draw(None, self.number))

    def any_failure(self) -> None:
        """In a forward or backward."""
        where = self.draw("forward", "inside", "outside")
        self.do(actions.fail, self.draw(*self.loop.micro_steps), self.draw(*RUNS), self.draw(0, 1), where)

    def any_step(self) -> None:
        """Of the optimizers."""
        self.do(self.draw(step, finish))
        self.do(step, self.draw(True, True, False, None))

    def any_gradient(self) -> None:
        """Of one rank, or none at all."""
        experts = [p for block in self.loop.reference.moe_blocks() for p in block.expert_parameters()]
        # Two accumulations of dense gradients alone are refused.
        if any(p.grad is not None and bool(p.grad.any()) for p in experts) and self.draw(False, True):
            self.do(actions.touch, self.seed())
        else:
            self.do(actions.zero, self.draw(False, True))

    def any_order(self) -> None:
        """Other ids, or the session's memory is given back."""
        self.do(self.draw(plans.suspend, plans.renumber), self.seed())

    def any_state(self) -> None:
        """What users keep, change and load."""
        seed = self.seed()
        self.draw(
            lambda: self.do(user_actions.save), lambda: self.do(user_actions.reload, seed),
            lambda: self.do(user_actions.change_optimizer, seed, self.draw(False, True)),
            lambda: self.do(user_actions.change_session, seed), lambda: self.do(user_actions.run_other_weights, seed),
        )()  # fmt: skip

    def any_memory(self) -> None:
        """Of parameters."""
        self.do(self.draw(user_actions.repoint, user_actions.offload, user_actions.onload))

    def any_write(self) -> None:
        """Of weights."""
        checked = self.loop.session.settings.verify_weights
        self.do(user_actions.write, self.draw("tensor", "data", "unnoticed" if checked else "data"))

    def store(self) -> None:
        """Weights, optimizer state and ids of experts, for other ranks."""
        loop, parts = self.loop, self.loop.session.whole
        if loop.seed % 3:
            self.do(plans.renumber, self.seed())
        if loop.seed % 2:
            save_checkpoint(loop.session.dcp_state_dict(loop.model), checkpoint_id=self.folder / "weights")
        state = dict(parts.weights(loop.model)), dict(parts.optimizer_state(loop.model, loop.optimizers[1]))
        if state[0] and loop.session.topology.group == 0:
            whole = loop.reference.state_dict(), loop.optimizers[0].state_dict()
            numbering = loop.session.numbering or Numbering()
            torch.save((numbering.to_json(), *state, *whole), self.folder / "state.pt")

    def load(self) -> None:
        """Go on with what other ranks have stored."""
        loop, parts = self.loop, self.loop.session.whole
        numbering, weights, state, whole, whole_state = torch.load(self.folder / "state.pt")
        loop.session.numbering = Numbering.from_json(numbering, "state.pt")
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.zero_()
        if loop.seed % 2:
            load_checkpoint(loop.session.dcp_state_dict(loop.model), checkpoint_id=self.folder / "weights")
            loop.session.weights_changed()
        else:
            parts.load_weights(loop.model, weights)
        parts.load_optimizer_state(loop.model, loop.optimizers[1], state)
        loop.reference.load_state_dict(whole)
        loop.optimizers[0].load_state_dict(whole_state)
        register_averages(loop)
        loop.compare()


Event = tuple[str, int, int, int]
"""`forward` or `backward`, micro-step, chunk, and which of several forwards."""


def in_order(order: str, micro_steps: list[int]) -> Iterator[Event]:
    """Forwards and backwards, each backward after its forward and the chunks above."""
    chunks = 2 if order == "interleaved" else 1
    forwards = [("forward", m, chunk, 0) for m in micro_steps for chunk in range(chunks)]
    backwards = [("backward", m, chunk, 0) for m in micro_steps for chunk in reversed(range(chunks))]
    if order == "one by one":
        for m in micro_steps:
            yield from (event for event in forwards + backwards if event[1] == m)
    elif order == "backwards last":
        yield from forwards + backwards
    else:
        if order == "interleaved":
            # Two micro-steps run through a chunk before the next chunk.
            places = {m: place // 2 for place, m in enumerate(micro_steps)}
            forwards.sort(key=lambda event: (places[event[1]], event[2]))
            backwards.sort(key=lambda event: (places[event[1]], -event[2]))
        warm_up = min(2 * chunks, len(forwards))
        for place in range(len(forwards) + warm_up):
            yield from forwards[place : place + 1]
            yield from backwards[place - warm_up : place - warm_up + 1] if place >= warm_up else []


if __name__ == "__main__":
    run(Case.parse(sys.argv[1]))
