"""`Parser`: help that ends with examples, `-q` and `-v`, and one line for a mistake, with the closest match."""

from __future__ import annotations

import argparse
import difflib
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

# Earlier spellings of options, still accepted.
ALIASES = {"--out": "--output", "--policies": "--policy", "--presets": "--preset", "--seeds": "--seed"}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser for all commands. Options can't be abbreviated; errors are one line.

    Args:
        examples: commands that the help ends with.
        settings: of an ArgumentParser.
    """

    def __init__(self, *, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self.examples = examples
        level = partial(
            self.add_mutually_exclusive_group().add_argument,
            dest="log_level",
            action="store_const",
            default=argparse.SUPPRESS,
        )
        level("-q", "--quiet", const=logging.WARNING, help="no notes and no progress bars")
        level("-v", "--verbose", const=logging.DEBUG, help="more notes")

    def format_help(self) -> str:
        return f"{super().format_help()}\nexamples:\n" + "".join(f"  {line}\n" for line in self.examples)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Replaces earlier spellings; ends with an error for an unknown option, before one for a missing argument."""
        words, known = list(sys.argv[1:] if args is None else args), self._option_string_actions
        for place, word in enumerate(words):
            if word == "--" or (self._subparsers and not word.startswith("-")):
                break
            name, equals, value = word.partition("=")
            if name not in known and ALIASES.get(name) in known:
                words[place] = ALIASES[name] + equals + value
            elif re.match("--?[a-zA-Z]", name) and known.keys().isdisjoint((name, name[:2])):
                self.error(f"unknown option {name}{closest(name, known)}")
        return super().parse_known_args(words, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = "/".join(action.option_strings) or str(action.metavar).lower()
            hint = closest(value, action.choices) or f"; use one of {', '.join(action.choices)}"
            self.error(f"unknown {name} {value}{hint}")


def closest(word: str, names: Iterable[str]) -> str:
    """The name that was probably meant, as a clause; empty if there is none."""
    return "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(word, names, 1))
