"""What Trimtab raises: a user's mistake, and a rank that failed; and texts of messages on wrong names."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """A user's input is wrong. The message is one line: what is wrong, where, and what would be right.

    Commands print the message and end with exit status 2.
    """


class RankFailedError(RuntimeError):
    """A rank ended before its work was done. The message names the rank and the cause, in one line."""


class RanksDisagreeError(RuntimeError):
    """Ranks made different calls where all must make the same. The message names the ranks and their calls."""


def install(extra: str | None) -> str:
    """How to install Trimtab, with an extra, from its checkout."""
    package = "." if extra is None else f"'.[{extra}]'"
    return f"pip install {package} in Trimtab's checkout"


def unknown(what: str, name: str, names: Iterable[str]) -> str:
    """That a name is none of those known, with the one that was probably meant, or all of them."""
    known = list(names)
    all_of = f"; use one of {', '.join(known)}"
    return f"unknown {what} {name}{closest(name, known) or all_of}"


def closest(word: str, names: Iterable[str]) -> str:
    """The name that was probably meant, as a clause; empty if there is none."""
    return "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(str(word), list(names), 1))
