"""`console`: prints tables and text of commands. Names from files can't control the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from trimtab.messages import visible


def console(*, quiet: bool = False) -> Console:
    """A console on standard output, without highlighting."""
    return _VisibleConsole(highlight=False, quiet=quiet)


class _VisibleConsole(Console):
    """Replaces control characters in all text. Those of styles are added later."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
