"""Is imbalance costing me, where, and would foresight help? Figures of a trace on given ranks, without planning it."""

from trimtab.analysis.analysis import Analysis, analyze
from trimtab.analysis.counted import CountedTrace, count_trace

__all__ = ["Analysis", "CountedTrace", "analyze", "count_trace"]
