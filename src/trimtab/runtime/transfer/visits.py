"""`Visits`: predicts the next instances of a training loop from a log of its earlier ones.

Loops repeat. Forwards of several micro-steps may run before their backwards, or alternate with them (1F1B, interleaved
chunks); a pass without gradients has forwards only. The prediction therefore searches the log for the longest earlier
match of its end, and continues from there. Events contain the difference to the micro-step before, since
the next step's micro-steps have other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

# Events that are kept at least; at most twice as many.
KEPT_EVENTS = 1 << 15
# Most places of the log that are compared with its end, and most events that are compared at each.
CANDIDATES = 32
COMPARED = 4096

Instance = tuple[int, int]
"""A micro-step's number and a layer."""

_ENTER, _REFRESH = -1, -2

_Event = tuple[int, int]
"""A layer, `_ENTER` or `_REFRESH`; and the micro-step's number less that of the event before."""


class Visits:
    """The log of one rank, equal on all ranks that make the same calls."""

    def __init__(self) -> None:
        self._log: list[_Event] = []
        self._places: dict[_Event, list[int]] = {}
        # The event after the best match of the log's end: the predicted next event.
        self._next = 0
        self._micro_step = 0

    def enter(self, micro_step: int) -> None:
        """Log that a micro-step's forward begins."""
        self._note(_ENTER, micro_step)

    def visit(self, micro_step: int, layer: int) -> None:
        """Log that a layer runs, forward or backward."""
        self._note(layer, micro_step)

    def refresh(self) -> None:
        """Log that weights change. Nothing is prefetched across this point."""
        self._note(_REFRESH, self._micro_step)

    def coming(self, most: int, num_layers: int) -> Iterator[Instance]:
        """The predicted next instances, at most `most`, none across a refresh: those after the best match of the log's
        end, or the next layers in order if there is no match."""
        if self._next == len(self._log):
            yield from islice(self._next_layers(num_layers), most)
            return
        micro_step = self._micro_step
        for layer, offset in self._log[self._next : self._next + 2 * most]:
            if layer == _REFRESH:
                return
            micro_step += offset
            if layer != _ENTER:
                yield micro_step, layer

    def _next_layers(self, num_layers: int) -> Iterator[Instance]:
        if not self._log or self._log[-1][0] == _REFRESH:
            return
        (before, _), (last, offset) = self._log[-2] if len(self._log) > 1 else (_REFRESH, 0), self._log[-1]
        goes_up = offset != 0 or last > before
        layers = range(last + 1, num_layers) if last == _ENTER or goes_up else range(last - 1, -1, -1)
        for layer in layers:
            yield self._micro_step, layer

    def _note(self, what: int, micro_step: int) -> None:
        event = what, micro_step - self._micro_step
        self._micro_step = micro_step
        as_predicted = self._next < len(self._log) and _equal(self._log[self._next], event)
        self._log.append(event)
        self._places.setdefault(_key(event), []).append(len(self._log) - 1)
        self._next = self._next + 1 if as_predicted else self._best_match()
        if len(self._log) > 2 * KEPT_EVENTS:
            self._shorten()

    def _best_match(self) -> int:
        """The event after the best earlier match of the log's end; the end of the log if there is no match."""
        end = len(self._log) - 1
        # A match of one layer only is not enough, since forward and backward run the same layers.
        best, longest = end + 1, 0 if self._log[end][0] == _ENTER else 1
        for place in reversed(self._places[_key(self._log[end])][-CANDIDATES - 1 : -1]):
            length = 1
            while length < min(place + 1, COMPARED) and _equal(self._log[place - length], self._log[end - length]):
                length += 1
            if length > longest:
                best, longest = place + 1, length
        return best

    def _shorten(self) -> None:
        dropped = len(self._log) - KEPT_EVENTS
        self._log = self._log[dropped:]
        self._next -= dropped
        self._places = {}
        for place, event in enumerate(self._log):
            self._places.setdefault(_key(event), []).append(place)
        if self._next <= 0:
            self._next = self._best_match()


def _key(event: _Event) -> _Event:
    """The part of an event that is compared. For entered micro-steps the number is not compared."""
    return (event[0], 0) if event[0] < 0 else event


def _equal(one: _Event, other: _Event) -> bool:
    return _key(one) == _key(other)
