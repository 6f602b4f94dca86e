"""`Parser`: help that ends with examples, `-q` and `-v`, and one line for a mistake, with the closest match."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from trimtab.errors import closest, unknown

# Earlier spellings of options, still accepted.
ALIASES = {"--out": "--output", "--policies": "--policy", "--presets": "--preset", "--seeds": "--seed"}


class NameList(argparse.Action):
    """Names of an option with several values, separated by spaces or commas. A repeated option adds to them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        names = [name for value in values for name in value.split(",")]
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest, None) or ()), *names])


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
                self.error(f"unknown option {name}{_commands_with(name) or closest(name, known)}")
        return super().parse_known_args(list(self._names_apart(words)), namespace)

    def _names_apart(self, words: Sequence[str]) -> Iterator[str]:
        """Words with one option for each name of a `NameList`, so that a file may follow the names."""
        option: argparse.Action | None = None
        for place, word in enumerate(words):
            if word == "--":
                yield from words[place:]
                return
            if option and _is_name(word, option):
                yield f"{option.option_strings[-1]}={word}"
                continue
            option = self._option_string_actions.get(word)
            if not isinstance(option, NameList) or not all(_is_name(name, option) for name in words[place + 1 :][:1]):
                option = None
            if option is None or place + 1 == len(words):
                yield word

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        for name in value.split(",") if isinstance(action, NameList) else [value]:
            if action.choices is not None and name not in action.choices:
                option = "/".join(action.option_strings) or str(action.metavar).lower()
                self.error(unknown(option, name, action.choices))


def _commands_with(option: str) -> str:
    """The commands that have an option, as a clause; empty if none has."""
    main = import_module("trimtab.cli.main")
    commands = main.make_parser(main.COMMANDS)._subparsers._group_actions[0].choices
    names = [parser.prog for parser in commands.values() if option in parser._option_string_actions]
    return f"; it is an option of {', '.join(names)}" if names else ""


def _is_name(word: str, option: argparse.Action) -> bool:
    """Whether a word after the option is one of its names, or a wrong one, and not a file or another option."""
    if word.split(",")[0] in (option.choices or ()):
        return True
    return not (word.startswith("-") or "/" in word or "." in word or Path(word).exists())
