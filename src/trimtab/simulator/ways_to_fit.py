"""Settings with which a run that does not fit its device would fit, by the formulas of `memory.py`."""

from __future__ import annotations

from trimtab.cluster import ModelSpec
from trimtab.cluster.layout import FSDP, SHARDINGS
from trimtab.simulator.memory import RankLoad, rank_memory
from trimtab.simulator.step import StepSettings


def ways_to_fit(load: RankLoad, model: ModelSpec, settings: StepSettings, device_bytes: float) -> list[str]:
    """Changes of settings with which the rank of `load` fits; empty if none does.

    First every single option that is enough, else both, then the fewest ranks per expert-parallel group with which the
    rest may stay, else with both options. Every rank has as many tokens as before.
    """
    ranks, now = len(load.homes_R), (settings.checkpointing, settings.sharding)
    more = SHARDINGS[SHARDINGS.index(settings.sharding) + 1 :]
    singles = [(True, settings.sharding), *((settings.checkpointing, sharding) for sharding in more)]

    def fits(choice: tuple[bool, str], times_ranks: int = 1) -> bool:
        checkpointing, sharding = choice
        needs = rank_memory(
            load, model, groups=settings.groups, sharding=sharding, checkpointing=checkpointing, times_ranks=times_ranks
        )
        return sum(needs.values()) <= device_bytes

    def text(choice: tuple[bool, str]) -> str:
        checkpointing, sharding = choice
        names = ["--checkpointing"] if checkpointing > settings.checkpointing else []
        return " ".join((*names, f"--sharding {sharding}") if sharding != settings.sharding else names)

    both = (True, FSDP)
    found = [choice for choice in singles if choice != now and fits(choice)]
    found = found or [(True, sharding) for sharding in more if fits((True, sharding))][:1]
    texts = [f"with {text(choice)}" for choice in found]
    powers = [2**power for power in range(1, model.num_experts.bit_length())]
    larger = [times for times in powers if model.num_experts % (ranks * times) == 0]
    for choice in dict.fromkeys((now, both)):
        enough = [times for times in larger if fits(choice, times)]
        if enough:
            name = f"from EP {ranks * enough[0]}"
            return [*texts, f"{name} with {text(choice)}" if text(choice) else name]
    return texts
