"""The simulator: time of a step under a plan, and its parts."""

from trimtab.simulator.expert_time import Balance, expert_time, summarise_balance

__all__ = ["Balance", "expert_time", "summarise_balance"]
