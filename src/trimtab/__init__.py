"""Trimtab: expert load balancing for MoE models in RL post-training, planned from routing that is already known.

`advise`, `plan`, `simulate` and `analyze` compute what the commands of these names print, from a trace or its files
and a `Run`, and `size_rollout` what `trimtab rollout` prints; `renumber_checkpoint` writes a checkpoint; `import_dump`
reads what a framework recorded.

`import trimtab` loads nothing; every name is imported when it is first used. The part that runs models is imported by
name, `trimtab.runtime` and `trimtab.integrations`, and needs torch.
"""

from importlib import import_module

# As in `typing`, whose import takes half of the time in which Ctrl-C still prints a stack.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from trimtab.api.advise import AdviceResult, advise
    from trimtab.api.analyze import AnalysisComparison, AnalysisResult, analyze
    from trimtab.api.import_dump import import_dump
    from trimtab.api.plan import plan
    from trimtab.api.plan_result import PlanResult
    from trimtab.api.renumber import RenumberResult, renumber_checkpoint, undo_renumbering
    from trimtab.api.run import Run
    from trimtab.api.simulate import SimulationResult, simulate
    from trimtab.api.size_rollout import RolloutSizing, size_rollout
    from trimtab.cluster import ClusterSpec, ModelSpec
    from trimtab.errors import InputError
    from trimtab.planner import Placement, Schedule, StepPlan, Workload
    from trimtab.trace import ImportOptions, RoutingTrace, TraceReader, TraceWriter, read_trace, write_trace

__all__ = [
    "AdviceResult",
    "AnalysisComparison",
    "AnalysisResult",
    "ClusterSpec",
    "ImportOptions",
    "InputError",
    "ModelSpec",
    "Placement",
    "PlanResult",
    "RenumberResult",
    "RolloutSizing",
    "RoutingTrace",
    "Run",
    "Schedule",
    "SimulationResult",
    "StepPlan",
    "TraceReader",
    "TraceWriter",
    "Workload",
    "advise",
    "analyze",
    "import_dump",
    "plan",
    "read_trace",
    "renumber_checkpoint",
    "simulate",
    "size_rollout",
    "undo_renumbering",
    "write_trace",
]
__version__ = "0.1.0"

_MODULES = {
    "api.advise": ("AdviceResult", "advise"),
    "api.analyze": ("AnalysisComparison", "AnalysisResult", "analyze"),
    "api.import_dump": ("import_dump",),
    "api.plan": ("plan",),
    "api.plan_result": ("PlanResult",),
    "api.renumber": ("RenumberResult", "renumber_checkpoint", "undo_renumbering"),
    "api.run": ("Run",),
    "api.simulate": ("SimulationResult", "simulate"),
    "api.size_rollout": ("RolloutSizing", "size_rollout"),
    "cluster": ("ClusterSpec", "ModelSpec"),
    "errors": ("InputError",),
    "planner": ("Placement", "Schedule", "StepPlan", "Workload"),
    "trace": ("ImportOptions", "RoutingTrace", "TraceReader", "TraceWriter", "read_trace", "write_trace"),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(("__version__", *__all__))
