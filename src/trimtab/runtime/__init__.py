"""Executes plans on `torch.distributed`: dispatch, expert compute, transfers of replica weights and gradients.

It needs expert tensors and a function that applies them, and is independent of transformers and of RL.
"""

from trimtab.planner import PlannedStep
from trimtab.runtime.layer.layer import ExpertLayer
from trimtab.runtime.layer.micro_step import MicroStep
from trimtab.runtime.plan_report import PlanReport, RankMemory
from trimtab.runtime.program.grouped_products import (
    ExpertWeight,
    RowGroups,
    gated_experts,
    grouped_bias,
    grouped_linear,
)
from trimtab.runtime.session import Session

__all__ = [
    "ExpertLayer",
    "ExpertWeight",
    "MicroStep",
    "PlanReport",
    "PlannedStep",
    "RankMemory",
    "RowGroups",
    "Session",
    "gated_experts",
    "grouped_bias",
    "grouped_linear",
]
