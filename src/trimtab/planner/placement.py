"""Level two, placement: the home rank of every expert."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.errors import InputError
from trimtab.trace.routing import Array


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
