"""Every balancer behind one protocol: what it may know, and the `StepPlan` that it makes of it."""

from trimtab.policies.policy import Policy, Traits, View, look
from trimtab.policies.static import Static
from trimtab.policies.trimtab import Trimtab

POLICIES: dict[str, Policy] = {"static": Static(), "trimtab": Trimtab()}

__all__ = ["POLICIES", "Policy", "Traits", "View", "look"]
