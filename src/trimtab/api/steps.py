"""The steps of a trace that are simulated, scaled to whole steps: the same for `analyze`, `simulate` and `advise`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.analysis.trace_counts import DEFAULT_BUDGET
from trimtab.api.run import Run
from trimtab.array_type import Array
from trimtab.cluster import ModelSpec
from trimtab.cluster.specs import slot_numbers
from trimtab.errors import InputError
from trimtab.figures import plural
from trimtab.planner import SequenceCounts, budget_for
from trimtab.simulator.comparison import with_checkpointing
from trimtab.simulator.comparison_case import ComparisonCase, step_of
from trimtab.simulator.resampling import RecordedStep, ResampledTrace, cut_step, whole_steps
from trimtab.trace import RoutingTrace, TraceReader

# Simulated by default, if the trace has so many after its first.
MOST_STEPS = 6

PreparedStep = tuple[SequenceCounts, RoutingTrace | ResampledTrace]

log = logging.getLogger("trimtab")


@dataclass(frozen=True, eq=False)
class TraceSteps:
    """Recorded steps of a trace, up to the last one that is simulated.

    Attributes:
        name: of the trace, for messages.
        recorded: oldest first.
        measured: how many of the last ones are simulated; balancers know those before.
        is_stated: whether options or the trace say how large whole steps are.
    """

    name: str
    recorded: tuple[RecordedStep, ...]
    measured: int
    is_stated: bool = True

    @property
    def last(self) -> RoutingTrace:
        """The last step as it was recorded."""
        return self.recorded[-1].trace

    @property
    def is_scaled(self) -> bool:
        """Whether some step was not recorded wholly."""
        return not all(step.is_whole for step in self.recorded)

    @property
    def sequences(self) -> int:
        """Recorded sequences of the measured step that has fewest."""
        return min(step.counts.num_sequences for step in self.recorded[-self.measured :])

    def with_layers(self, layers: Array) -> TraceSteps:
        """Some of the layers, indices `[N]`."""
        return replace(self, recorded=tuple(_with_layers(step, layers) for step in self.recorded))

    def _completed(self, full: int) -> tuple[TraceSteps, tuple[str, ...]]:
        """Steps of `full` tokens or more, if nobody says how large they are, with a sentence that says so; and a past
        of a single scaled step.

        That past is another drawing from the same prompts: nearer to a real step before than half of the prompts are to
        the other half, since the correction of scaled steps holds for it, too.
        """
        recorded, texts = self.recorded, []
        if not self.is_stated:
            recorded = tuple(replace(step, tokens=max(step.tokens, full)) for step in recorded)
            least = min(step.trace.num_tokens for step in recorded)
            if least < full:
                texts.append(
                    f"Scaled from {least:,} recorded tokens to a step of {full:,}, one full micro-step of every rank; "
                    "give its size by --step-tokens, or take it as recorded by --sampled 1."
                )
        if len(recorded) == 1 and not recorded[0].is_whole:
            recorded *= 2
        return replace(self, recorded=recorded, is_stated=True), tuple(texts)

    def case(
        self,
        run: Run,
        model: ModelSpec,
        *,
        meet: str = "step",
        equal_terms: bool = False,
        seed: int = 0,
    ) -> ComparisonCase:
        """The steps to simulate in a run, whose ranks are given; scaled ones with their halves.

        Where ranks share sequences, `Layout.pieces`, each sequence is as many pieces. Without a granularity of
        checkpointing, it is the least with which `static` fits.

        Args:
            run: `micro_steps` are those of the largest step; else `token_budget` holds, by default 8192 or the longest
                piece, and steps have a full micro-step of every rank at least, unless something says how large they
                are.
            seed: of the drawing of scaled steps.
        """
        cluster, settings = run.nodes, run.settings(model, meet)
        micro_steps, token_budget = run.micro_steps, run.token_budget
        full = cluster.ranks * settings.groups * (token_budget or DEFAULT_BUDGET) if micro_steps is None else 0
        whole, assumed = self._completed(full)
        assumed = (*self.last.notes, *assumed)
        pieces = settings.layout.pieces

        def cut(steps: Sequence[tuple[SequenceCounts, RoutingTrace | ResampledTrace]]) -> list[PreparedStep]:
            return [cut_step(counts, trace, pieces) for counts, trace in steps]

        recorded = (
            whole_steps(whole.recorded, seed) if whole.is_scaled else [(s.counts, s.trace) for s in self.recorded]
        )
        steps = cut(recorded)
        counts = [each for each, _ in steps]
        if micro_steps is not None:
            budget = budget_for([each.lengths for each in counts], cluster.ranks * settings.groups, micro_steps)
        else:
            longest = max(-(-int(step.counts.lengths.max(initial=1)) // pieces) for step in self.recorded)
            budget = max(DEFAULT_BUDGET, longest) if token_budget is None else token_budget

        def made(steps: Sequence[PreparedStep]) -> ComparisonCase:
            return ComparisonCase(
                cluster=cluster,
                model=model,
                sequences=steps[-1][0],
                earlier=tuple(each for each, _ in steps[:-1]),
                token_budget=budget,
                mini_batches=run.mini_batches,
                equal_terms=equal_terms,
                settings=settings,
                measured=self.measured,
                traces=tuple(trace for _, trace in steps[-self.measured :]),
                recorded=self.sequences if whole.is_scaled else None,
                assumed=assumed,
                past_is_drawn=len(whole.recorded) > len(self.recorded),
            )

        case = made(steps)
        if whole.is_scaled:
            halves = tuple(made(cut(whole_steps(whole.recorded, seed, half=half))) for half in (0, 1))
            case = replace(case, halves=halves)
        case = case.with_slots(*slot_numbers(run.slots))
        return with_checkpointing(case) if run.recompute_granularity is None else case


def read_steps(reader: TraceReader, run: Run, *, most: int = MOST_STEPS) -> TraceSteps:
    """The steps of a trace that a run names; of several without `run.steps` the first is not measured.

    Args:
        most: steps that are measured without `run.steps`.

    Raises:
        InputError: if there is no such step, or fewer than `steps`, or they have more tokens than `step_tokens`.
    """
    if not reader.facts.lengths.any():
        raise InputError(f"{reader.name}: the trace is empty; there is nothing to simulate")
    last, earlier = step_of(reader.by_step(), run.step)
    traces = [*earlier, last]
    measured = run.steps or min(most, max(1, len(earlier)))
    if measured > len(traces):
        raise InputError(
            f"--steps {measured}: {reader.name} has {plural(len(traces), 'step')} up to step {last.steps[0]}"
        )
    part = run.sampled or last.sampled
    given = {"--step-tokens": run.step_tokens, "--sampled": run.sampled}
    for option, value in given.items():
        if value is not None and last.sampled not in (1, run.sampled):
            log.info("%s is used; %s says that %g of each step was recorded", option, reader.name, last.sampled)
    recorded = []
    for trace in traces:
        tokens = round(trace.num_tokens / part) if run.step_tokens is None else int(run.step_tokens)
        if tokens < trace.num_tokens:
            raise InputError(
                f"--step-tokens {tokens}: step {trace.steps[0]} of {reader.name} has {trace.num_tokens} tokens; it "
                "should be those of a whole step, in all expert-parallel groups"
            )
        recorded.append(RecordedStep(SequenceCounts.from_trace(trace), trace, tokens))
    is_stated = any(value is not None for value in given.values()) or last.sampled < 1
    return TraceSteps(reader.name, tuple(recorded), measured, is_stated)


def _with_layers(step: RecordedStep, layers: Array) -> RecordedStep:
    counts, trace = step.counts, step.trace
    return replace(
        step,
        counts=SequenceCounts(
            np.ascontiguousarray(counts.counts_SLE[:, layers]), counts.lengths, counts.unknown_SL[:, layers]
        ),
        trace=replace(
            trace,
            expert_ids=np.ascontiguousarray(trace.expert_ids[:, layers]),
            layer_indices=trace.layer_indices[layers],
        ),
    )


def spread_layers(steps: TraceSteps, ranks: int, most: int) -> Array:
    """At most so many layers `[N]`, evenly chosen in the order of their imbalance: they stand for all of them."""
    counts_LE = sum(step.counts.counts_SLE.sum(axis=0, dtype=np.int64) for step in steps.recorded[-steps.measured :])
    loads_LR = np.asarray(counts_LE).reshape(len(counts_LE), ranks, -1).sum(axis=2)
    order = np.argsort(loads_LR.max(axis=1) / np.maximum(1, loads_LR.mean(axis=1)), kind="stable")
    count = min(most, len(order))
    return np.sort(order[(2 * np.arange(count) + 1) * len(order) // (2 * count)])
