"""`PlanningInRollout`: finished sequences are counted, and a strategy is chosen, while other sequences generate.

The work is done on the planner's thread. The first data rank keeps the counts of all ranks by the hash of the sequence,
so that only counts of later sequences are sent when the step is planned.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.planner import PlannedStep, SequenceCounts
from trimtab.runtime.ranks.topology import Topology
from trimtab.trace import RoutingTrace

# A strategy is chosen again if less than this part of a step's tokens was counted ahead.
KNOWN_AHEAD = 0.5


class RankSequences(NamedTuple):
    """The sequences of one rank when the step is planned.

    Attributes:
        hashes: `[S]` uint64.
        is_new: `[S]` bool, whether the sequence was not counted ahead.
        counts: of the new ones.
    """

    hashes: Array
    is_new: Array
    counts: SequenceCounts


class PlannedAhead(NamedTuple):
    """What was planned before a step.

    Attributes:
        planned: headers whose rules the step follows; None if there are none.
        seconds: of counting and planning, during the rollout.
        known: the part of the step's tokens from which it was planned.
    """

    planned: PlannedStep | None = None
    seconds: float = 0.0
    known: float = 0.0

    def credited(self, planned: PlannedStep) -> PlannedStep:
        """A plan of the step, with what was planned before it."""
        is_used = self.planned is not None and planned.strategies_s is self.planned.strategies_s
        return replace(planned, ahead_s=self.seconds, known_ahead=self.known if is_used else 0.0)


class PlanningInRollout:
    """Counts of one step's finished sequences. `run` is for the planner's thread, all else for the training thread.

    Attributes:
        planned: on the first data rank, planned from the sequences counted so far; None if there were none.
        tokens: of these sequences; of those of them that are in the step, once it is known.
        seconds: of counting and planning, during the rollout.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._known: dict[int, SequenceCounts] = {}
        self._sent: set[int] = set()
        self._waiting = 0
        self._has_failed = False
        self._changed = threading.Condition()
        self.planned: PlannedStep | None = None
        self.tokens = 0
        self.seconds = 0.0

    def expect(self) -> None:
        """Announce a `run`."""
        with self._changed:
            self._waiting += 1

    def run(self, trace: RoutingTrace, plan: Callable[[SequenceCounts], PlannedStep]) -> None:
        """Count sequences, gather the counts on the first data rank, and plan there. Collective over the threads."""
        start, is_gathered = time.perf_counter(), False
        try:
            self._gather(trace)
            is_gathered = True
            if self._known:
                # In an order that does not depend on that of arrival.
                self.planned = plan(SequenceCounts.concatenate([self._known[key] for key in sorted(self._known)]))
            self.tokens = sum(int(counts.lengths.sum()) for counts in self._known.values())
            self.seconds += time.perf_counter() - start
        except BaseException as error:
            self._has_failed = True
            # If a rank has ended, the next call of the session says so, unless this one ends before.
            level = logging.DEBUG if isinstance(error, RuntimeError) and not is_gathered else logging.WARNING
            logging.getLogger("trimtab").log(level, "planning ahead failed, the step is planned at once: %r", error)
        with self._changed:
            self._waiting -= 1
            self._changed.notify_all()

    def is_complete(self, patience_s: float | None = None) -> bool:
        """Wait for all runs, for at most some seconds if these are given. Returns whether they have succeeded."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, patience_s) and not self._has_failed

    def count_new(self, trace: RoutingTrace) -> RankSequences:
        """This rank's sequences, with the counts of those that were not counted ahead."""
        is_new = np.array([key not in self._sent for key in trace.sequence_hashes.tolist()], bool)
        new = trace if is_new.all() else trace.select(np.flatnonzero(is_new))
        return RankSequences(trace.sequence_hashes, is_new, SequenceCounts.from_trace(new))

    def result(self, tokens: int) -> PlannedAhead:
        """What was planned, with a plan if that was from enough of the step's tokens.

        Args:
            tokens: of the step.
        """
        planned = self.planned
        if planned is not None and self.tokens >= KNOWN_AHEAD * tokens:
            # The other groups' plans are not followed.
            planned = replace(planned, plans=planned.plans[:1])
        else:
            planned = None
        return PlannedAhead(planned, self.seconds, min(1.0, self.tokens / max(1, tokens)))

    def join(self, gathered: Sequence[RankSequences]) -> SequenceCounts:
        """The sequences of all ranks, in rank order, on the first data rank.

        Args:
            gathered: `count_new` of every rank.
        """
        parts, known = [], 0
        for hashes, is_new, counts in gathered:
            if is_new.all():
                parts.append(counts)
                continue
            places = np.cumsum(is_new) - 1
            parts += [
                counts.select(place) if new else self._known[key]
                for key, new, place in zip(hashes.tolist(), is_new.tolist(), places[:, None], strict=True)
            ]
            known += sum(int(self._known[key].lengths[0]) for key in hashes[~is_new].tolist())
        self.tokens = known
        return SequenceCounts.concatenate(parts)

    def _gather(self, trace: RoutingTrace) -> None:
        """Send counts of new sequences to the first data rank."""
        mine = self.count_new(trace)
        gathered: list[RankSequences | None] | None = None
        if self._topology.data_rank == 0:
            gathered = [None] * self._topology.num_data_ranks
        dist.gather_object(mine, gathered, group=self._topology.planning_data, group_dst=0)
        self._sent |= set(mine.hashes.tolist())
        for part in gathered or []:
            assert part is not None
            keys = part.hashes[part.is_new].tolist()
            self._known |= {key: part.counts.select(np.array([place])) for place, key in enumerate(keys)}
