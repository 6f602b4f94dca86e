"""Text of one-line error messages: places, and values of untrusted files in a few words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trimtab.errors import InputError

_KINDS = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "a whole number",
    list: "a list",
    str: "a text",
    type(None): "null",
}


@contextmanager
def at_place(place: Any) -> Iterator[None]:
    """A context that puts a place before the message of an InputError: "line 3: no top_indices"."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def kind_of(value: Any) -> str:
    """The kind of a JSON value in words: "a number", "a list"."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def reason(error: BaseException) -> str:
    """The message of an exception, shortened to one line."""
    text = next(iter(str(error).splitlines()), "") or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."


def printable(text: str, replacement: str = "?") -> str:
    """The text with line ends and other unprintable characters replaced."""
    return "".join(letter if letter.isprintable() else replacement for letter in text)


def clip(name: str) -> str:
    """A name from a file, printable and at most 80 characters long."""
    return printable(name[:80]) + ("..." if len(name) > 80 else "")


def few_of(names: Sequence[str]) -> str:
    """Names in one line, at most three of them: "a, b, c and 9 more"."""
    return printable(", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""))


def short(value: Any) -> str:
    """A value as Python prints it, at most 60 characters long."""
    try:
        text = repr(list(value) if isinstance(value, tuple) else value)
    except ValueError:  # a whole number too long to print
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
