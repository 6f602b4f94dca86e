"""`trimtab completion`: a script with which bash and zsh complete commands, options and their choices."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

SCRIPT = """\
# eval "$(trimtab completion)", in ~/.bashrc or ~/.zshrc
if [ -n "${{ZSH_VERSION:-}}" ]; then autoload -U +X compinit bashcompinit && compinit && bashcompinit; fi
_trimtab() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command= options= words=
  if [ "$COMP_CWORD" -gt 1 ]; then command="${{COMP_WORDS[1]}}"; fi
  if [ "$COMP_CWORD" -gt 2 ]; then
    case "$command" in {groups}) command="$command ${{COMP_WORDS[2]}}" ;; esac
  fi
  case "$command:$before" in
{cases}
  esac
  case "$word" in -*) words="$options" ;; esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _trimtab trimtab
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        description="Print a script with which bash and zsh complete commands, options and their choices. Files are "
        "completed as elsewhere.",
        examples=["trimtab completion >> ~/.bashrc", 'eval "$(trimtab completion)"'],
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from trimtab.cli.main import COMMANDS, make_parser

    parser = make_parser(COMMANDS)
    groups = [name for name, each in _commands(parser).items() if _commands(each)]
    print(SCRIPT.format(groups="|".join(groups), cases="\n".join(_cases(parser, ""))), end="")


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return {name: each for name, each in action.choices.items() if name}
    return {}


def _cases(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    """Yields what may follow: values of an option with choices, else options, commands and choices of arguments."""
    options: list[str] = []
    words: list[str] = []
    for action in parser._actions:
        options += action.option_strings
        choices = [str(choice) for choice in action.choices or ()]
        if action.option_strings and choices:
            keys = "|".join(f'"{name}:{option}"' for option in action.option_strings)
            yield f'    {keys}) words="{" ".join(choices)}" ;;'
        elif not action.option_strings:
            words += choices
    yield f'    "{name}:"*) options="{" ".join(options)}" words="{" ".join(words)}" ;;'
    for command, each in _commands(parser).items():
        yield from _cases(each, f"{name} {command}".strip())
