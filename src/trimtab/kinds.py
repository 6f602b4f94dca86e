"""`Kind`: what values of an argument may be, with one check for Python, the command line and settings files."""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trimtab.errors import InputError, unknown

# Of any number of things; larger ones would not fit the integers of kernels.
LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Kind:
    """What values of an argument may be: an annotation of the argument, `Annotated[int, positive]`.

    Attributes:
        form: what a value should be, for messages.
        read: the value that is meant, or ValueError, TypeError or OverflowError.
        from_text: what `read` is given of a text of the command line.
        types: of values in a settings file.
        names: those that are valid, if a value is one of some names.
        metavar: stands for a value in the command line's help.
        option: on the command line, if it is not the argument's name.
    """

    form: str
    read: Callable[[Any], Any]
    from_text: Callable[[str], Any] = str
    types: tuple[type, ...] = (str,)
    names: Sequence[str] = ()
    metavar: str = "NAME"
    option: str = ""

    def check(self, name: str, value: Any) -> Any:
        """The value that is meant.

        Raises:
            InputError: if the value of the argument `name` is not of this kind.
        """
        try:
            found = self.read(value)
            if not isinstance(found, int) or found <= LARGEST:
                return found
        except InputError:
            raise
        except (ValueError, TypeError, OverflowError):
            if self.names:
                raise InputError(unknown(name, str(value), self.names)) from None
            raise InputError(f"{name}: {value!r} should be {self.form}") from None
        raise InputError(f"{name}: {value!r} is too large; it should be at most {LARGEST}")

    def __call__(self, text: str) -> Any:
        """The value of a text, as the `type` of an option. Choices are left to the parser, which knows the option."""
        try:
            found = self.from_text(text) if self.names else self.read(self.from_text(text))
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{text!r} should be {self.form}") from None
        if isinstance(found, int) and found > LARGEST:
            raise argparse.ArgumentTypeError(f"{text} is too large; it should be at most {LARGEST}")
        return found


def _in_range(low: float, value: Any, *, most: float = float("inf"), above: bool = False) -> Any:
    if not (low < value if above else low <= value) or not value <= most or value == float("inf"):
        raise ValueError
    return value


def _whole(least: int, value: Any) -> int:
    return int(_in_range(least, operator.index(value)))


def _tokens(value: int | str) -> int:
    """A number of tokens, also of a text such as 20M, 1.5M or 80k."""
    text = str(value)
    factor = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:].lower(), 1)
    return _whole(1, round(float(text[:-1] if factor > 1 else text) * factor))


def _one_of(names: Sequence[Any], value: Any) -> Any:
    if value not in names:
        raise ValueError
    return value


def choice(*names: str, option: str = "") -> Kind:
    """One of some names."""
    return Kind("a text in quotes", partial(_one_of, names), names=names, option=option)


def as_given(value: Any) -> Any:
    return value


_COUNT: dict[str, Any] = {"from_text": int, "types": (int,), "metavar": "N"}
_NUMBER: dict[str, Any] = {"from_text": float, "types": (int, float), "metavar": "X"}


def at_least(least: int) -> Kind:
    """Whole numbers."""
    return Kind(f"a whole number of at least {least}", partial(_whole, least), **_COUNT)


positive, whole = at_least(1), at_least(0)
tokens = Kind("a number of tokens, such as 20M", _tokens, types=(int, str), metavar="N")
part = Kind("above 0, and at most 1", partial(_in_range, 0, most=1, above=True), **_NUMBER)
price = Kind("a price, 0 or more", partial(_in_range, 0), **_NUMBER)
text = Kind("a text in quotes", as_given)
switch = Kind("true or false", partial(_one_of, (True, False)), types=(bool,))
