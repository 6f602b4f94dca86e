"""The load of a step, its plan, and the predicted time of the plan."""
