"""`trimtab.analyze`: what expert imbalance costs in a trace, where, and whether known routing would help."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.analysis import Analysis, TraceCounts, count_trace
from trimtab.analysis import analyze as analyze_counts
from trimtab.analysis.analysis import figures
from trimtab.analysis.fixed_placements import SLOTS, PlannedLoads
from trimtab.analysis.summary import answer, cost_summary, layers_summary
from trimtab.analysis.trace_comparison import TraceComparison, compare_traces
from trimtab.analysis.trace_comparison import figures as comparison_figures
from trimtab.api.plan import planned_loads
from trimtab.api.result_summary import Summarised
from trimtab.api.run import Run
from trimtab.api.steps import TraceSteps, read_steps
from trimtab.figures import plural
from trimtab.planner import SequenceCounts
from trimtab.report.comparison_report import ComparisonReport
from trimtab.report.html import write_html
from trimtab.report.imbalance import Imbalance
from trimtab.report.model import AnalysisReport
from trimtab.simulator.comparison import with_checkpointing
from trimtab.trace import RoutingTrace
from trimtab.trace.store import ROW_GROUP_BYTES, MemoryReader, Source, TraceReader, open_trace

# Ids of a trace that is held in memory, and simulated for seconds. Larger ones are only counted, a chunk at a time.
MOST_BYTES = 1 << 30
# Ids of a step that are planned; of larger steps, so many, of evenly chosen parts.
PLANNED_BYTES = 1 << 28

log = logging.getLogger("trimtab")


@dataclass(frozen=True, eq=False, repr=False)
class AnalysisResult(Summarised):
    """Figures of a trace on given ranks with contiguous homes.

    Attributes:
        source: name of the trace's file or files.
        files: the trace's files, in their order; none if it was in memory.
        analysis: all figures; `Analysis` documents them.
    """

    source: str
    files: tuple[Path, ...]
    analysis: Analysis

    @property
    def report(self) -> AnalysisReport:
        """The page's content."""
        return AnalysisReport(self.source, self.analysis)

    def figures(self) -> dict[str, Any]:
        """What `trimtab analyze --json` writes."""
        return {"schema": "trimtab-analyze-2", "trace": [str(file) for file in self.files]} | figures(self.analysis)

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page of `trimtab analyze --html`. Writes are atomic."""
        write_html(self.report, path, self.figures())

    def compare(self, other: AnalysisResult) -> AnalysisComparison:
        """Compare with another trace, or with another step of this one, of a model with the same layers and experts.

        Raises:
            InputError: if layers, experts, ranks or ranks per node differ.
        """
        compared = compare_traces((self.source, other.source), self.analysis, other.analysis)
        return AnalysisComparison((self.source, other.source), (self.files, other.files), compared)

    @property
    def imbalance(self) -> Imbalance:
        counts = self.analysis.counts
        return Imbalance({"static": self.analysis.loads_MLR}, counts.layer_indices, counts.step_M, counts.top_k)

    def summary(self) -> Sequence[str]:
        analysis = self.analysis
        size = plural(analysis.counts.num_micro_steps, "micro-step")
        return (
            f"{self.source}, {size} on {plural(analysis.ranks, 'rank')}",
            self.report.assumed,
            answer(analysis),
            cost_summary(analysis),
            layers_summary(analysis),
        )


@dataclass(frozen=True, eq=False, repr=False)
class AnalysisComparison:
    """Two traces, A and B, on the same ranks.

    Attributes:
        sources: name of the file or files of each.
        files: their files; none of a trace that was in memory.
        comparison: all figures; `TraceComparison` documents them.
    """

    sources: tuple[str, str]
    files: tuple[tuple[Path, ...], tuple[Path, ...]]
    comparison: TraceComparison

    @property
    def report(self) -> ComparisonReport:
        """The page's content."""
        return ComparisonReport(self.sources, self.comparison)

    def figures(self) -> dict[str, Any]:
        """What `trimtab analyze --compare --json` writes.

        traces: the files of A, and those of B.
        """
        traces = [[str(file) for file in files] for files in self.files]
        return {"schema": "trimtab-compare-2", "traces": traces} | comparison_figures(self.comparison)

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page of `trimtab analyze --compare --html`. Writes are atomic."""
        write_html(self.report, path, self.figures())

    def __repr__(self) -> str:
        shown = f"AnalysisComparison: {self.sources[0]} and {self.sources[1]}", self.report.assumed, self.report.answer
        return "\n  ".join(filter(None, shown))


def analyze(
    trace: RoutingTrace | Source,
    run: Run = Run(),  # noqa: B008
    *,
    counts: TraceCounts | None = None,
    first: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> AnalysisResult:
    """Say what expert imbalance costs in a routing trace, in which layers, and whether known routing would help.
    Traces can be larger than memory.

    Args:
        trace: as in `simulate`.
        run: the run; seconds are those of its steps.
        counts: of this trace and these ranks, from `trimtab.analysis.merge`, as counted on other machines; the trace is
            then not counted, and `step` and the size of micro-steps are those of the counts.
        first: called with what the counts alone tell, before anything is planned or simulated.
        progress: called with the number of sequences read and of all sequences.

    Raises:
        InputError: one line, if the trace can't be read, is empty, has no such step, is not of the model, or does not
            fit the ranks or the token budget.
    """
    reader = open_trace(trace)
    run = run.on_ranks(reader)
    if counts is not None:
        run = replace(run, token_budget=counts.token_budget, micro_steps=None)
    token_budget, micro_steps, nodes = run.token_budget, run.micro_steps, run.nodes
    fitting = run.model_or_none(reader)
    counted = slice(None) if run.step is None else reader.facts.steps == run.step
    ids_bytes = int(reader.facts.lengths[counted].sum()) * reader.empty.num_layers * reader.empty.top_k
    is_small = ids_bytes * reader.empty.expert_ids.itemsize <= MOST_BYTES
    case = recorded = None
    no_seconds = ""
    if fitting is None:
        no_seconds = "No preset model has these numbers of experts and top-k; name yours with --model to get seconds."
    elif not is_small:
        one = "; --step takes one step" if run.step is None and len(np.unique(reader.facts.steps)) > 1 else ""
        no_seconds = f"No seconds: there are more than {MOST_BYTES >> 20:,} MB of expert ids{one}."
    else:
        reader = MemoryReader(reader.by_step() if run.step is None else reader.read(run.step), reader)
        recorded = read_steps(reader, run if run.step is None else replace(run, steps=1))
        # Static placement has no replicas.
        kept = replace(run, slots=0, recompute_granularity=run.recompute_granularity or "none")
        case = recorded.case(kept, fitting)
        # Counts are of whole sequences.
        longest = int(reader.facts.lengths.max())
        token_budget, micro_steps = max(case.token_budget, longest if case.settings.layout.pieces > 1 else 0), None
    for note in () if case else reader.empty.notes:
        log.info("%s", note)
    ranks = nodes.ranks
    if counts is None:
        counts = count_trace(
            reader, ranks=ranks, token_budget=token_budget, micro_steps=micro_steps, step=run.step, progress=progress
        )
    if first:
        first(answer(analyze_counts(counts, ranks=ranks, ranks_per_node=nodes.ranks_per_node)))
    if case and run.recompute_granularity is None:
        case = with_checkpointing(case)
    planned = None
    if ranks > 1:
        sequences, about = _step_to_plan(reader, counts.steps[-1], recorded)
        # With the slots of the other rows.
        planned_run = replace(run, slots=SLOTS, token_budget=counts.token_budget, micro_steps=None)
        planned = PlannedLoads(about, *planned_loads(sequences, planned_run, fitting))
    analysis = analyze_counts(
        counts,
        ranks=ranks,
        ranks_per_node=nodes.ranks_per_node,
        case=case,
        planned=planned,
        no_seconds=no_seconds,
    )
    return AnalysisResult(reader.name, tuple(reader.files), analysis)


def _step_to_plan(reader: TraceReader, step: int, recorded: TraceSteps | None) -> tuple[SequenceCounts, str]:
    """The step, or evenly chosen parts of it if it is large, and what a plan of it is called in tables.

    Args:
        recorded: steps that are counted, of which it is the last.
    """
    about = "a plan for each micro-step"
    if recorded:
        return recorded.recorded[-1].counts, about
    wanted = np.flatnonzero(reader.facts.steps == step)
    token_bytes = reader.empty.num_layers * reader.empty.top_k * reader.empty.expert_ids.itemsize
    end_bytes = np.cumsum(reader.facts.lengths[wanted], dtype=np.int64) * token_bytes
    every = -(-int(end_bytes[-1]) // PLANNED_BYTES)
    part_S = np.unique(end_bytes // ROW_GROUP_BYTES, return_inverse=True)[1]
    chosen = wanted[part_S % max(1, every) == 0]
    if len(chosen) < len(wanted):
        about += f", of {len(chosen):,} of {len(wanted):,} sequences"
    return SequenceCounts.from_trace(reader.read_sequences(chosen)), about
