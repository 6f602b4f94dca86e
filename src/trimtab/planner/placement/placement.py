"""`Placement`: the home rank of every expert."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError

# Limit of int16, the dtype of experts in plans.
MOST_EXPERTS = 32767


@dataclass(frozen=True, eq=False)
class Placement:
    """Homes of all experts. Every rank is home to E / R experts of every layer.

    Attributes:
        home: `[L, E]` int16, the rank that owns each expert's parameters and optimizer state.
    """

    home: Array

    @classmethod
    def contiguous(cls, num_layers: int, num_experts: int, num_ranks: int) -> Placement:
        """The usual placement: rank r is home to experts r * E / R up to (r + 1) * E / R.

        Raises:
            InputError: if the ranks don't divide the experts.
        """
        if num_experts % num_ranks:
            divisors = [ranks for ranks in range(1, num_experts + 1) if num_experts % ranks == 0]
            raise InputError(
                f"{num_ranks} ranks don't divide {num_experts} experts; use one of {', '.join(map(str, divisors))}"
            )
        home_E = np.arange(num_experts) // (num_experts // num_ranks)
        return cls(np.broadcast_to(home_E.astype(np.int16), (num_layers, num_experts)).copy())

    def check(self, num_layers: int, num_experts: int, num_ranks: int) -> None:
        """Raises InputError unless the homes fit the model, with the same number on every rank."""
        if self.home.shape != (num_layers, num_experts):
            layers, experts = self.home.shape
            raise InputError(
                f"the homes are for {layers} layers, {experts} experts; the step has {num_layers} layers, "
                f"{num_experts} experts"
            )
        if num_experts > MOST_EXPERTS:
            raise InputError(f"there are {num_experts} experts; plans hold up to {MOST_EXPERTS}")
        for layer, home_E in enumerate(self.home):
            if home_E.min() < 0 or home_E.max() >= num_ranks or len(set(np.bincount(home_E, minlength=num_ranks))) > 1:
                raise InputError(f"the homes of MoE layer {layer} are not spread evenly over {num_ranks} ranks")

    def moves(self, other: Placement, ranks_per_node: int) -> tuple[Array, Array]:
        """Numbers of experts `[L]` whose home in `other` is on another rank of the same node, and on another node."""
        other_node = self.home // ranks_per_node != other.home // ranks_per_node
        return np.count_nonzero((self.home != other.home) & ~other_node, axis=1), np.count_nonzero(other_node, axis=1)
