"""Content of a report, independent of its layout: the values of the page and the timeline file."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.analysis import Analysis
from trimtab.analysis.summary import answer, assumed
from trimtab.array_type import Array
from trimtab.figures import plural
from trimtab.report.tables import Facts, TableData


@dataclass(frozen=True)
class PolicyResult:
    """One balancer's row and bar.

    Attributes:
        name: as in `POLICIES`.
        about: a short description, such as what it plans from.
        step_time_s: seconds of recompute and update.
        speedup: over `static`.
        fraction_of_balanced: step time with even routing divided by this one's; None without an ideal run.
        max_over_mean: mean over instances.
        parts_s: seconds on the critical path by part, keys of `clocks.PARTS`; they add up to `step_time_s`. Empty if
            unknown.
        memory_bytes: of a rank, by name, such as "replica pool"; the busiest rank's.
        replicas_per_instance: copies away from home.
        max_over_mean_p99: 99th percentile over instances; None if unknown.
        cross_node_fraction: part of the rows that are computed on another node than their token's; None if unknown.
        speedup_over_eplb: over `eplb`; None if it did not run, or had no past loads.
        fits: whether the memory of the device is enough; None if unknown.
        first_moves_s: seconds of the first placement of experts, which is paid once and in no step time.
        is_ideal: whether it is the ideal run, not a balancer.
        mark: what a reader must know about the row, such as "no history".
    """

    name: str
    about: str
    step_time_s: float
    speedup: float
    fraction_of_balanced: float | None
    max_over_mean: float
    parts_s: dict[str, float]
    memory_bytes: dict[str, float]
    replicas_per_instance: float
    max_over_mean_p99: float | None = None
    cross_node_fraction: float | None = None
    speedup_over_eplb: float | None = None
    fits: bool | None = None
    first_moves_s: float = 0.0
    is_ideal: bool = False
    mark: str = ""


@dataclass(frozen=True, eq=False)
class LoadMap:
    """Rank loads of a step under one plan.

    Attributes:
        loads_MLR: `[M, L, R]` int64 tokens.
    """

    title: str
    loads_MLR: Array


@dataclass(frozen=True, eq=False)
class Timeline:
    """Operations of every lane of every rank in one micro-step.

    Attributes:
        title: policy and micro-step.
        names: kinds of operations, such as "experts" or "dispatch".
        kind_N: `[N]` uint8, index into `names`.
        lane_N: `[N]` uint8, index into `recorded_operations.LANES`.
        rank_N: `[N]` int16.
        layer_N: `[N]` int16, -1 for none.
        start_N, end_N: `[N]` float64 seconds from the beginning.
    """

    title: str
    names: tuple[str, ...]
    kind_N: Array
    lane_N: Array
    rank_N: Array
    layer_N: Array
    start_N: Array
    end_N: Array


@dataclass(frozen=True, eq=False)
class Report:
    """One page.

    Attributes:
        title: of the page.
        answer: the result in one sentence.
        assumed: what nobody stated, with the options that change it; "" if nothing was assumed.
        facts: names and values of the setting: trace, model, cluster, command.
        policies: in any order; they are shown by step time.
        layer_names: `[L]` of the heat map's layers.
        before, after: loads without a plan and under the plan of the answer.
        timelines: of one micro-step each; the first is shown first.
        notes: assumptions and limits of the figures.
        table_title: of the table of policies.
        marks_fastest: whether the fastest of them is marked; not if a measurement does not tell which it is.
        cases: of a sweep; None with one case.
        device_bytes: memory of a rank; None if unknown.
        sensitivity: step times under other assumptions; None if they were not asked for.
    """

    title: str
    answer: str
    facts: Facts
    policies: tuple[PolicyResult, ...]
    layer_names: tuple[str, ...]
    before: LoadMap
    after: LoadMap
    timelines: tuple[Timeline, ...]
    notes: tuple[str, ...] = ()
    table_title: str = "Recompute and update of one step"
    marks_fastest: bool = True
    cases: TableData | None = None
    device_bytes: float | None = None
    assumed: str = ""
    sensitivity: TableData | None = None


@dataclass(frozen=True, eq=False)
class AnalysisReport:
    """A page on a trace.

    Attributes:
        source: the trace's file or files, as text.
    """

    source: str
    analysis: Analysis

    @property
    def title(self) -> str:
        model = self.analysis.counts.model or "a trace"
        return f"Expert load of {model} on {plural(self.analysis.ranks, 'rank')}"

    @property
    def answer(self) -> str:
        """Returns the result in a few sentences."""
        return answer(self.analysis)

    @property
    def assumed(self) -> str:
        """Returns what nobody stated; "" if nothing was assumed."""
        return assumed([self.analysis])
