"""Analysis of a trace on given ranks, without a plan: cost of imbalance, its layers, and gains of known routing."""

from trimtab.analysis.analysis import Analysis, analyze
from trimtab.analysis.trace_counts import CountPlan, TraceCounts, count_shard, count_trace, merge, plan_counts

__all__ = ["Analysis", "CountPlan", "TraceCounts", "analyze", "count_shard", "count_trace", "merge", "plan_counts"]
