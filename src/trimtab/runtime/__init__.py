"""Carry a plan out on real ranks: dispatch, expert compute, replica transfers, gradients brought home.

Needs torch. Knows stacked expert tensors and a function that applies them; knows nothing of transformers or of RL.
"""

from trimtab.runtime.layer.layer import ExpertLayer
from trimtab.runtime.layer.micro_step import MicroStep
from trimtab.runtime.planning import PlannedStep, PlanReport
from trimtab.runtime.rows.expert_compute import ExpertWeight, RowGroups, gated_experts, grouped_bias, grouped_linear
from trimtab.runtime.session import Session

__all__ = [
    "ExpertLayer",
    "ExpertWeight",
    "MicroStep",
    "PlanReport",
    "PlannedStep",
    "RowGroups",
    "Session",
    "gated_experts",
    "grouped_bias",
    "grouped_linear",
]
