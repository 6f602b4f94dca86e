"""Log lines and progress bars on stderr, of a command and of the ranks that it starts."""

from __future__ import annotations

import logging
import sys


class _Stderr(logging.Handler):
    """Prints messages to what `sys.stderr` is at the time: a progress bar replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def show_messages(level: int) -> None:
    """Print Trimtab's messages of a level and above; progress bars if INFO is shown and stderr is a terminal.

    Only for processes of the command line: the library leaves logging to its caller.
    """
    import rich

    logger = logging.getLogger("trimtab")
    logger.setLevel(level)
    logger.handlers = [_Stderr()]
    rich.reconfigure(stderr=True, quiet=level > logging.INFO or not sys.stderr.isatty())
