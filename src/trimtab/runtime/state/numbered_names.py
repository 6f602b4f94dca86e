"""`find_number`: the number in Parameter names that counts the experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab.errors import InputError

# With this pattern `re.split` returns texts and numbers alternately.
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True)
class NumberedName:
    """A name with a variable number.

    Attributes:
        head, tail: the text before and after the number.
    """

    head: str
    tail: str

    def with_number(self, number: int) -> str:
        return f"{self.head}{number}{self.tail}"


def find_number(names: Sequence[str], others: Iterable[str]) -> NumberedName:
    """Find the number in which names differ, as in `experts.0.w1.weight`, `experts.1.w1.weight`.

    A single name may have several zeros. Then a zero counts if it is one in all other names of the same form too, and
    the last of these is taken.

    Args:
        names: of a rank's experts in home order; the number counts them from 0.
        others: all names of the model.

    Raises:
        InputError: if the names do not have this form.
    """
    parts = [_NUMBER.split(name) for name in names]
    first = parts[0]
    forms = {tuple(part[::2]) for part in parts}
    places = [
        place
        for place in range(1, len(first), 2)
        if len(forms) == 1
        and [part[place] for part in parts] == [str(row) for row in range(len(parts))]
        and all(part[:place] == first[:place] and part[place + 1 :] == first[place + 1 :] for part in parts)
    ]
    if len(names) == 1:
        same_form = [part for part in map(_NUMBER.split, others) if part[::2] == first[::2]]
        places = [place for place in places if all(part[place] == "0" for part in same_form)]
    if not places:
        raise InputError(
            f"the experts of one layer are named {', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''}; "
            "names of a list of experts should differ in one number, which counts the rank's experts from 0"
        )
    return NumberedName("".join(first[: places[-1]]), "".join(first[places[-1] + 1 :]))
