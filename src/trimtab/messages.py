"""Log lines and progress bars on stderr, of a command and of the ranks that it starts; text that is safe to print."""

from __future__ import annotations

import logging
import re
import sys
from functools import cache

# Control characters but newline, and those that change the direction of text.
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with control characters other than newline replaced by U+FFFD. Names in files may hold them."""
    return _CONTROL.sub("\ufffd", text)


@cache
def note_once(line: str) -> None:
    """Log a line unless this process has logged it before."""
    logging.getLogger("trimtab").info(line)


class _Stderr(logging.Handler):
    """Prints messages to what `sys.stderr` is at the time: a progress bar replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(visible(self.format(record)), file=sys.stderr)


def show_messages(level: int) -> None:
    """Print Trimtab's messages of a level and above; progress bars if INFO is shown and stderr is a terminal.

    Only for processes of the command line: the library leaves logging to its caller.
    """
    import rich

    logger = logging.getLogger("trimtab")
    logger.setLevel(level)
    logger.handlers = [_Stderr()]
    rich.reconfigure(stderr=True, quiet=level > logging.INFO or not sys.stderr.isatty())
