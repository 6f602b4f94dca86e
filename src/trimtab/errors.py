"""What Trimtab raises: a user's mistake, and a rank that failed."""


class InputError(ValueError):
    """A user's input is wrong. The message is one line: what is wrong, where, and what would be right.

    Commands print the message and end with exit status 2.
    """


class RankFailedError(RuntimeError):
    """A rank ended before its work was done. The message names the rank and the cause, in one line."""


class RanksDisagreeError(RuntimeError):
    """Ranks made different calls where all must make the same. The message names the ranks and their calls."""
