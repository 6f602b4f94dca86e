"""Exchanges of replicas in plain Python: for every giver, all ranks with free slots and all replicas are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.array_type import Array
from trimtab.planner.replicas.kernel_values import Limits, Placing


@dataclass(frozen=True, eq=False)
class PlainExchanges:
    """A state of a search, which is changed; homes `[E]`, limits and the load that no rank should exceed."""

    placing: Placing
    home_E: Array
    limits: Limits
    target: int

    def round(self, count: int, most_givers: int, gave_up_R: Array) -> tuple[int, int]:
        """As `exchange_replicas`."""
        loads_R = self.placing.loads_R
        over = [r for r in range(len(loads_R)) if loads_R[r] > self.target and not gave_up_R[r]]
        exchanges = 0
        for giver in sorted(over, key=lambda r: -loads_R[r])[:most_givers]:
            if loads_R[giver] <= self.target:
                continue
            place, taker, expert = self._choose(count, giver)
            gave_up_R[giver] = taker < 0
            if taker >= 0:
                self._exchange(place, taker, expert, giver, is_new=place == count)
                count += place == count
                exchanges += 1
        return count, exchanges

    def _node(self, rank: int) -> int:
        return rank // self.limits.ranks_per_node

    def _movable(self, expert: int) -> int:
        return int(self.placing.at_home_E[expert]) - self.limits.smallest_share

    def _choose(self, count: int, giver: int) -> tuple[int, int, int]:
        """The new replica's number and rank, and its expert; a rank below 0 if there is none."""
        counts_NE, loads_R, at_home_E, free_slots_R, (experts_P, ranks_P, tokens_P) = self.placing
        smallest = self.limits.smallest_share
        own = np.flatnonzero(self.home_E == giver)
        expert = int(own[at_home_E[own].argmax()])
        if self._movable(expert) < smallest:
            return -1, -1, expert
        copies = {int(rank) for rank in ranks_P[:count][experts_P[:count] == expert]} | {giver}
        nodes = {self._node(rank) for rank in copies} - {self._node(giver)}

        def saved(rank: int) -> int:
            is_near = self._node(rank) == self._node(giver)
            return 0 if is_near else min(int(counts_NE[self._node(rank), expert]), self._movable(expert))

        def may_take(rank: int, returned: int) -> bool:
            if rank in copies or self._node(rank) in nodes or loads_R[rank] - returned + smallest > self.target:
                return False
            return self._node(rank) == self._node(giver) or saved(rank) >= smallest

        def missed(p: int) -> int:
            node = self._node(ranks_P[p])
            is_far = self._node(self.home_E[experts_P[p]]) != node
            return min(int(tokens_P[p]), int(counts_NE[node, experts_P[p]])) if is_far else 0

        # Most rows saved. Of equals a free slot before a replica, on the least loaded rank, or the first replica.
        choices = [
            (-saved(r), 0, int(loads_R[r]), count, r) for r in np.flatnonzero(free_slots_R).tolist() if may_take(r, 0)
        ]
        for p in range(count):
            rank, home = int(ranks_P[p]), self.home_E[experts_P[p]]
            is_good = home != rank and loads_R[home] + tokens_P[p] <= loads_R[giver]
            if is_good and may_take(rank, tokens_P[p]):
                choices.append((missed(p) - saved(rank), 1, p, p, rank))
        return (*min(choices)[3:], expert) if choices else (-1, -1, expert)

    def _exchange(self, place: int, taker: int, expert: int, giver: int, *, is_new: bool) -> None:
        counts_NE, loads_R, at_home_E, free_slots_R, (experts_P, ranks_P, tokens_P) = self.placing
        wanted, most = loads_R[giver] - self.target, self._movable(expert)
        if is_new:
            free_slots_R[taker] -= 1
            ranks_P[place] = taker
        else:
            at_home_E[experts_P[place]] += tokens_P[place]
            loads_R[self.home_E[experts_P[place]]] += tokens_P[place]
            loads_R[taker] -= tokens_P[place]
        if self._node(taker) != self._node(giver):
            wanted = max(wanted, counts_NE[self._node(taker), expert])
        tokens = max(min(wanted, most, self.target - loads_R[taker]), self.limits.smallest_share)
        experts_P[place], tokens_P[place] = expert, tokens
        at_home_E[expert] -= tokens
        loads_R[giver] -= tokens
        loads_R[taker] += tokens
