"""`SimulatedCase`: one cluster and micro-step size with the outcome of every balancer, the fastest, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.figures import plural
from trimtab.simulator.comparison import Outcome, figures, fits
from trimtab.simulator.comparison_case import ComparisonCase
from trimtab.simulator.sensitivity import Sensitivity
from trimtab.simulator.step import WAITING, imbalance_cost

# Step times with permuted expert ids are those of this order (`random_orders`).
PERMUTATION_SEED = 0


@dataclass(frozen=True, eq=False, repr=False)
class SimulatedCase:
    """One cluster and micro-step size, with what every balancer gives there.

    Attributes:
        ranks: of the expert-parallel group.
        slots: replica slots per rank; or "auto", if each balancer has the best number.
        micro_steps: that the step was to take; None if a token budget was given.
        case: cluster, model, routing and settings.
        outcomes: plan, simulated step and memory by balancer, in the order of `POLICIES`; `static` and `balanced`
            among them.
        permuted_s: step time in seconds by balancer if the experts of every layer had their ids in random order.
        permuted_waiting_s: of `static` with this order (`SimulatedStep.causes_s`).
        dispatcher: what is sent to a node, "rows" or "tokens", if it was asked for; else None.
        sensitivity: seconds of the best balancers under changes of the cluster, if they were asked for.
    """

    ranks: int
    slots: int | str
    micro_steps: int | None
    case: ComparisonCase
    outcomes: dict[str, Outcome]
    permuted_s: Mapping[str, float]
    permuted_waiting_s: float
    dispatcher: str | None = None
    sensitivity: tuple[Sensitivity, ...] = ()

    @property
    def text(self) -> str:
        """Ranks, slots, micro-steps and dispatcher of the case."""
        size = f", {plural(self.micro_steps, 'micro-step')}" if self.micro_steps else ""
        sent = f", {self.dispatcher} sent" if self.dispatcher else ""
        slots = f"{self.slots} slots" if isinstance(self.slots, str) else plural(self.slots, "slot")
        return f"{plural(self.ranks, 'rank')}, {slots}{size}{sent}"

    @property
    def real(self) -> dict[str, Outcome]:
        """Outcomes without those of the ideal run."""
        return {name: outcome for name, outcome in self.outcomes.items() if not outcome.policy.traits.ideal}

    @property
    def fastest(self) -> str:
        """The fastest balancer of those that fit the device, or of all if none does."""
        fitting = {name: outcome for name, outcome in self.real.items() if fits(self.case, outcome)} or self.real
        return min(fitting, key=lambda name: fitting[name].simulated.step_time_s)

    @property
    def fits(self) -> bool:
        """Whether some balancer that ran fits the device."""
        return fits(self.case, self.outcomes[self.fastest])

    @property
    def reported(self) -> str:
        """`trimtab` if it ran, else the fastest."""
        return "trimtab" if "trimtab" in self.outcomes else self.fastest

    @property
    def cost(self) -> float:
        """Part of the step that imbalance costs."""
        return imbalance_cost(self.seconds("static"), self.seconds("balanced"))

    @property
    def waiting(self) -> float:
        """Part of the step in which ranks wait for the busiest one's experts."""
        return max(0.0, self.outcomes["static"].simulated.causes_s[WAITING] / self.seconds("static"))

    def seconds(self, name: str) -> float:
        """Step time of a balancer that ran."""
        return self.outcomes[name].simulated.step_time_s

    def figures(self) -> dict[str, Any]:
        """Figures of all balancers that ran, and step times with permuted expert ids."""
        return {
            "policies": figures(self.case, self.outcomes),
            "ids_permuted": {
                "seed": PERMUTATION_SEED, "step_time_s": dict(self.permuted_s), "waiting_s": self.permuted_waiting_s,
            },
            "sensitivity": [asdict(row) for row in self.sensitivity],
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"SimulatedCase: {self.text}; {', '.join(self.outcomes)}"
