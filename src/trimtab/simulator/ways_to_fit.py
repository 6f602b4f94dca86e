"""Settings with which a run that does not fit its device would fit, by the formulas of `memory.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trimtab.cluster import ModelSpec
from trimtab.cluster.parallel_layout import FSDP, SHARDINGS, Checkpointing
from trimtab.simulator.memory import RankLoad, rank_memory
from trimtab.simulator.step import StepSettings


def ways_to_fit(load: RankLoad, model: ModelSpec, settings: StepSettings, device_bytes: float) -> list[str]:
    """Changes of settings with which the rank of `load` fits; empty if none does.

    First every single option that is enough, else both, then the fewest ranks per expert-parallel group with which the
    rest may stay, else with both options, then the same of pipeline stages. Every rank has as many tokens as before.
    """
    ranks, now = len(load.homes_R), (settings.checkpointing, settings.sharding)
    layers = model.moe_layers + model.dense_layers
    more = SHARDINGS[SHARDINGS.index(settings.sharding) + 1 :]
    singles: list[tuple[Checkpointing, str]] = [
        (True, settings.sharding),
        *((settings.checkpointing, sharding) for sharding in more),
    ]

    def fits(choice: tuple[Checkpointing, str], times_ranks: int = 1, pp: int = settings.layout.pp) -> bool:
        checkpointing, sharding = choice
        needs = rank_memory(
            load, model, groups=settings.groups, sharding=sharding, checkpointing=checkpointing,
            layout=replace(settings.layout, pp=pp), times_ranks=times_ranks,
        )  # fmt: skip
        return sum(needs.values()) <= device_bytes

    def text(choice: tuple[Checkpointing, str]) -> str:
        checkpointing, sharding = choice
        names = ["--checkpointing"] if checkpointing is True and settings.checkpointing is not True else []
        return " ".join((*names, f"--sharding {sharding}") if sharding != settings.sharding else names)

    both: tuple[Checkpointing, str] = (True, FSDP)
    found = [choice for choice in singles if choice != now and fits(choice)]
    if not found:
        found = [*[(True, sharding) for sharding in more if fits((True, sharding))][:1]]
    texts = [f"with {text(choice)}" for choice in found]
    powers = [2**power for power in range(1, model.num_experts.bit_length())]
    larger = [times for times in powers if model.num_experts % (ranks * times) == 0]
    deeper = [settings.layout.pp * times for times in powers if settings.layout.pp * times <= layers]

    def first(values: list[int], enough: Callable[[tuple[Checkpointing, str], int], bool], name: str) -> list[str]:
        """The smallest value with which the rest may stay, else with both options."""
        for choice in dict.fromkeys((now, both)):
            for value in values:
                if enough(choice, value):
                    return [f"{name.format(value)} with {text(choice)}" if text(choice) else name.format(value)]
        return []

    texts += first([ranks * times for times in larger], lambda choice, n: fits(choice, n // ranks), "from EP {}")
    return texts + first(deeper, lambda choice, n: fits(choice, pp=n), "from --pp {}")
