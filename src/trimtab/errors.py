"""What Trimtab raises when the mistake is in what it was given."""


class InputError(ValueError):
    """A user's input is wrong. The message is one line: what is wrong, where, and what would be right.

    Commands print the message and end with exit status 2.
    """
