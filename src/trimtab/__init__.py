"""Trimtab: expert load balancing for MoE models in RL post-training, planned from routing that is already known.

`import trimtab` brings the laptop half (traces, planning, prediction), each name as it is first asked for. The half
that runs models is imported by name, `trimtab.runtime` and `trimtab.integrations`, and needs torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.cluster import ClusterSpec, ModelSpec
    from trimtab.errors import InputError
    from trimtab.planner import Placement, Schedule, StepPlan, Workload
    from trimtab.trace import Known, RoutingTrace, TraceReader, TraceWriter, read_trace, write_trace

__all__ = [
    "ClusterSpec",
    "InputError",
    "Known",
    "ModelSpec",
    "Placement",
    "RoutingTrace",
    "Schedule",
    "StepPlan",
    "TraceReader",
    "TraceWriter",
    "Workload",
    "read_trace",
    "write_trace",
]
__version__ = "0.1.0"

_FOLDERS = {"cluster": ("ClusterSpec", "ModelSpec"), "errors": ("InputError",)} | {
    "planner": ("Placement", "Schedule", "StepPlan", "Workload"),
    "trace": ("Known", "RoutingTrace", "TraceReader", "TraceWriter", "read_trace", "write_trace"),
}


def __getattr__(name: str) -> Any:
    for folder, names in _FOLDERS.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{folder}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
