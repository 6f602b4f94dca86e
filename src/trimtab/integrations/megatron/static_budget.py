"""`StaticBudget`: rows in HybridEP's static dispatch buffers, which plans have to fit.

With `moe_expert_rank_capacity_factor` a rank's buffer has a fixed size for a number of tokens. HybridEP drops rows that
exceed it, and Megatron then runs the whole step again without the option. A plan limits the rows of each rank before
the step, so that none is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from megatron.core.transformer.moe import token_dispatcher

from trimtab.array_type import Array
from trimtab.integrations.megatron.option_tables import RANK_CAPACITY


class RowLimits(NamedTuple):
    """The options of a session that decide whether plans limit rows; see `Session`."""

    mode: str
    exact: bool
    max_rows_per_rank: int | None


class StaticBudget(NamedTuple):
    """Rows of a rank's dispatch buffer.

    Attributes:
        factor: rows of the buffer divided by those of even ranks; None if it has as many as the call.
        top_k: experts of a token.
        multiple: what rows of each expert are padded to; 1 for no padding.
        experts: physical experts of a rank, H + S.
    """

    factor: float | None
    top_k: int
    multiple: int
    experts: int

    @classmethod
    def of(cls, config: Any, experts: int) -> StaticBudget:
        """The budget that a TransformerConfig sets."""
        multiple = 1
        if getattr(config, "moe_use_grouped_tensor", False):
            multiple = token_dispatcher.get_align_size_for_quantization(config)
        return cls(getattr(config, RANK_CAPACITY, None), config.moe_router_topk, multiple, experts)

    def rows(self, tokens: int) -> int:
        """Rows of the buffer for a number of tokens on each rank, as Megatron computes them; 0 without a factor."""
        return self._multiples(int(tokens * self.top_k * (self.factor or 0)))

    def padded(self, counts_G: Array) -> Array:
        """Rows of each physical expert with padding, of those without."""
        return -(-counts_G // self.multiple) * self.multiple

    def problem_of_limits(self, limits: RowLimits) -> str:
        """Why plans would not fit the buffers, whatever they are; "" if they may."""
        if limits.mode == "live" and self.multiple > 1:
            return "moe_use_grouped_tensor=True pads rows for planned products; mode 'live' needs it switched off"
        if self.factor is None or limits.mode in ("off", "shadow"):
            return ""
        if limits.mode != "plan" or not (limits.exact or limits.max_rows_per_rank):
            return (
                f"{RANK_CAPACITY}={self.factor} needs plans that limit the rows of a rank; use mode 'plan' with "
                f"exact=True or max_rows_per_rank, not mode {limits.mode!r} without"
            )
        if self.factor < 1:
            return f"{RANK_CAPACITY}={self.factor} is less than even ranks have; set it to 1 or more"
        return ""

    def problem_of_step(self, limits: RowLimits, tokens_M: Sequence[int]) -> str:
        """Why a step's plan would not fit the buffers; "" if it fits.

        Args:
            tokens_M: for each micro-batch the tokens of a rank.
        """
        if self.factor is None or limits.mode != "plan":
            return ""
        for index, tokens in enumerate(tokens_M):
            even, most = tokens * self.top_k, limits.max_rows_per_rank
            limit = even if most is None or (limits.exact and even < most) else most
            needed = self._multiples(limit + min(limit, self.experts) * (self.multiple - 1), down=True)
            if even and needed > self.rows(tokens):
                name = f"max_rows_per_rank={most:,}" if limit == most else "exact=True"
                padding = f", padded to {self.multiple} for each expert" if self.multiple > 1 else ""
                return (
                    f"{RANK_CAPACITY}={self.factor} is {self.rows(tokens):,} rows of a rank in micro-batch {index}, "
                    f"and {name} allows {needed:,}{padding}; set the factor to {self._factor_for(needed, tokens)} "
                    "or more"
                )
        return ""

    def _factor_for(self, rows: int, tokens: int) -> float:
        """The smallest factor of two digits that is enough for these rows."""
        return next(n / 100 for n in count(100) if self._replace(factor=n / 100).rows(tokens) >= rows)

    def _multiples(self, rows: int, *, down: bool = False) -> int:
        return rows - rows % self.multiple if down else rows + -rows % self.multiple
