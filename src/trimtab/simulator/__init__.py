"""How long does a step take under a plan, and where does the time go?"""

from trimtab.simulator.expert_time import Balance, expert_time, summarise_balance

__all__ = ["Balance", "expert_time", "summarise_balance"]
