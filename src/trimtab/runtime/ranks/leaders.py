"""`Leaders`: exchanges between the first ranks of all expert-parallel groups, each of which plans for its group.

So neither memory nor time of planning grows with the number of groups. A rank that fails tells the others in place of
its next value, so that none waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from trimtab.errors import InputError

T = TypeVar("T")


class _Failure(NamedTuple):
    """The error of a rank. Other ranks may not be able to load its class."""

    is_input: bool
    text: str


class Leaders:
    """Exchanges of one plan.

    Args:
        group: the first ranks of all expert-parallel groups, in their order; None for one expert-parallel group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._told: BaseException | None = None

    def run(self, plan: Callable[[], T]) -> T:
        """Call a function that uses `gather` and `spread`. Collective; it raises on all ranks if it fails on any.

        Raises:
            InputError, RuntimeError: as on the first rank that failed; a rank's own error on that rank.
        """
        try:
            result = plan()
            self.gather([])
            return result
        except BaseException as error:
            if self._group is not None and error is not self._told:
                is_input, rank = isinstance(error, InputError), dist.get_rank()
                text = str(error) if is_input else f"rank {rank} failed: {type(error).__name__}: {error}"
                with suppress(Exception):
                    self._exchange(_Failure(is_input, text))
            raise

    def gather(self, values: Sequence[T]) -> list[T]:
        """The values of all ranks, one after another. Collective."""
        if self._group is None:
            return list(values)
        return [value for part in self._exchange(list(values)) for value in part]

    def spread(self, make: Callable[[], Sequence[T]]) -> T:
        """Of the values that the first of the ranks makes, this rank's. Collective."""
        if self._group is None:
            return make()[0]
        values = list(make()) if dist.get_rank(self._group) == 0 else None
        # The others get to know of an error.
        self.gather([])
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values, group=self._group, group_src=0)
        return mine[0]  # type: ignore[no-any-return]

    def _exchange(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, mine, group=self._group)
        for value in found:
            if isinstance(value, _Failure):
                self._told = InputError(value.text) if value.is_input else RuntimeError(value.text)
                raise self._told
        return found
