"""`Parser`: help that ends with examples, `-q` and `-v`, and one line for a mistake, with the closest match."""

from __future__ import annotations

import argparse
import difflib
import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

# Earlier spellings of options, still accepted.
ALIASES = {"--out": "--output", "--policies": "--policy", "--presets": "--preset", "--seeds": "--seed"}
EXAMPLES = "examples:\n  "


class Parser(argparse.ArgumentParser):
    """An ArgumentParser for all commands. Options can't be abbreviated; errors are one line.

    Args:
        examples: commands that the help ends with.
        settings: of an ArgumentParser.
    """

    def __init__(self, *, examples: Sequence[str] = (), **settings: Any) -> None:
        epilog = EXAMPLES + "\n  ".join(examples)
        super().__init__(epilog=epilog, formatter_class=_HelpFormatter, allow_abbrev=False, **settings)
        messages = self.add_mutually_exclusive_group()
        for flags, level, text in (
            (("-q", "--quiet"), logging.WARNING, "no notes and no progress bars"),
            (("-v", "--verbose"), logging.DEBUG, "more notes"),
        ):
            messages.add_argument(
                *flags, action="store_const", dest="log_level", const=level, default=argparse.SUPPRESS, help=text
            )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        return super().parse_known_args(self._check_options(sys.argv[1:] if args is None else args), namespace)

    def _check_options(self, words: Iterable[str]) -> list[str]:
        """The words with today's spellings. Ends with an error for an unknown option.

        argparse itself would complain about missing arguments first.
        """
        words, known, lists = list(words), self._option_string_actions, set()
        for place, word in enumerate(words):
            if word == "--" or (self._subparsers and not word.startswith("-")):
                break
            name, *value = word.split("=", 1)
            if name not in known and ALIASES.get(name) in known:
                name = ALIASES[name]
                words[place] = "=".join([name, *value])
            if name in known:
                if known[name].nargs == "+" and known[name].dest in lists:
                    self.error(f"{name} is given twice; give all its values after one {name}")
                lists.add(known[name].dest)
            elif name.startswith("--") or (name[:1] == "-" < name and not name[1].isdigit() and name[:2] not in known):
                self.error(f"unknown option {name}{_closest(name, known)}")
        return words

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = "/".join(action.option_strings) or str(action.metavar).lower()
            choices = list(map(str, action.choices))
            hint = _closest(value, choices) or f"; use one of {', '.join(choices)}"
            self.error(f"unknown {name} {value}{hint}")


class _HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(EXAMPLES) else super()._fill_text(text, width, indent)


def _closest(word: str, names: Iterable[str]) -> str:
    """The name that was probably meant, as a clause; empty if there is none."""
    return "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(word, names, 1))
