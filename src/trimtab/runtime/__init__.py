"""Carry a plan out on real ranks: dispatch, expert compute, replica transfers, gradients brought home.

Needs torch. Knows stacked expert tensors and a function that applies them; knows nothing of transformers or of RL.
"""

from trimtab.runtime.experts import RowGroups, gated_experts
from trimtab.runtime.layer import ExpertLayer
from trimtab.runtime.session import PlanReport, Session

__all__ = ["ExpertLayer", "PlanReport", "RowGroups", "Session", "gated_experts"]
