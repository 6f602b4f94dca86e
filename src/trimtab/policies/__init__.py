"""Every balancer under one name. A policy turns the load of a step into a `StepPlan`."""

from trimtab.policies.static import plan_static
from trimtab.policies.trimtab import plan_trimtab

POLICIES = {"static": plan_static, "trimtab": plan_trimtab}

__all__ = ["POLICIES", "plan_static", "plan_trimtab"]
