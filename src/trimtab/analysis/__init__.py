"""Analysis of a trace on given ranks, without a plan: cost of imbalance, its layers, and gains of known routing."""

from trimtab.analysis.analysis import Analysis, analyze
from trimtab.analysis.trace_counts import TraceCounts, count_trace

__all__ = ["Analysis", "TraceCounts", "analyze", "count_trace"]
