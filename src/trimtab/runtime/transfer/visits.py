"""`Visits`: in which order a training loop comes to its instances, and so which come next.

Loops repeat themselves. Forwards of several micro-steps may come before their backwards, and take turns with them
(1F1B, interleaved chunks); a pass without gradients runs forwards alone. So what happened is kept as one long log, and
what follows is read where the log agrees longest with its own end. Events are kept relative to the one before, since
the next step's micro-steps have other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

# Events that are remembered at least, and twice as many at most.
REMEMBERED = 1 << 15
# Places of the log that are compared with its end, and events that are compared there.
CANDIDATES = 32
COMPARED = 4096

Instance = tuple[int, int]
"""A micro-step's number and a layer."""

_ENTER, _REFRESH = -1, -2

_Event = tuple[int, int]
"""A layer, `_ENTER` or `_REFRESH`; and the micro-step's number less that of the event before."""


class Visits:
    """The log of one rank, the same on all that make the same calls."""

    def __init__(self) -> None:
        self._log: list[_Event] = []
        self._places: dict[_Event, list[int]] = {}
        # Where the log goes on as it did after the place that agrees best with its end.
        self._next = 0
        self._micro_step = 0

    def enter(self, micro_step: int) -> None:
        """A micro-step's forward begins."""
        self._note(_ENTER, micro_step)

    def visit(self, micro_step: int, layer: int) -> None:
        """A layer runs, forward or backward."""
        self._note(layer, micro_step)

    def refresh(self) -> None:
        """Weights change, so that nothing can be fetched across this point."""
        self._note(_REFRESH, self._micro_step)

    def coming(self, most: int, num_layers: int) -> Iterator[Instance]:
        """The instances that are expected next, at most `most`, none across a refresh.

        As in the part of the log that agrees longest with its end; straight on, if there is none.
        """
        if self._next == len(self._log):
            yield from islice(self._straight_on(num_layers), most)
            return
        micro_step = self._micro_step
        for layer, ahead in self._log[self._next : self._next + 2 * most]:
            if layer == _REFRESH:
                return
            micro_step += ahead
            if layer != _ENTER:
                yield micro_step, layer

    def _straight_on(self, num_layers: int) -> Iterator[Instance]:
        if not self._log or self._log[-1][0] == _REFRESH:
            return
        (before, _), (last, ahead) = self._log[-2] if len(self._log) > 1 else (_REFRESH, 0), self._log[-1]
        goes_up = ahead != 0 or last > before
        layers = range(last + 1, num_layers) if last == _ENTER or goes_up else range(last - 1, -1, -1)
        for layer in layers:
            yield self._micro_step, layer

    def _note(self, what: int, micro_step: int) -> None:
        event = what, micro_step - self._micro_step
        self._micro_step = micro_step
        expected = self._next < len(self._log) and _alike(self._log[self._next], event)
        self._log.append(event)
        self._places.setdefault(_key(event), []).append(len(self._log) - 1)
        self._next = self._next + 1 if expected else self._best_match()
        if len(self._log) > 2 * REMEMBERED:
            self._forget()

    def _best_match(self) -> int:
        """Behind the place before the log's end that agrees with most of it; the log's end if no event agrees."""
        end = len(self._log) - 1
        # One layer alone says little: backward comes to it, too.
        best, longest = end + 1, 0 if self._log[end][0] == _ENTER else 1
        for place in reversed(self._places[_key(self._log[end])][-CANDIDATES - 1 : -1]):
            length = 1
            while length < min(place + 1, COMPARED) and _alike(self._log[place - length], self._log[end - length]):
                length += 1
            if length > longest:
                best, longest = place + 1, length
        return best

    def _forget(self) -> None:
        gone = len(self._log) - REMEMBERED
        self._log = self._log[gone:]
        self._next -= gone
        self._places = {}
        for place, event in enumerate(self._log):
            self._places.setdefault(_key(event), []).append(place)
        if self._next <= 0:
            self._next = self._best_match()


def _key(event: _Event) -> _Event:
    """What has to be equal for two events to be alike. Which micro-step is entered is the loop's free choice."""
    return (event[0], 0) if event[0] < 0 else event


def _alike(one: _Event, other: _Event) -> bool:
    return _key(one) == _key(other)
