"""How long does a plan take? So far in the simplest unit: tokens that the busiest rank of every instance computes."""

from trimtab.simulator.expert_time import Balance, expert_time, summarise_balance

__all__ = ["Balance", "expert_time", "summarise_balance"]
