"""Trimtab: expert load balancing for MoE models in RL post-training, planned from routing that is already known.

`import trimtab` brings the laptop half (traces, planning, prediction). The half that runs models is imported by name,
`trimtab.runtime` and `trimtab.integrations`, and needs torch.
"""

from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.errors import InputError
from trimtab.planner import Placement, Schedule, StepPlan, Workload
from trimtab.trace import RoutingTrace, read_trace, write_trace

__all__ = [
    "ClusterSpec",
    "InputError",
    "ModelSpec",
    "Placement",
    "RoutingTrace",
    "Schedule",
    "StepPlan",
    "Workload",
    "read_trace",
    "write_trace",
]
__version__ = "0.1.0"
