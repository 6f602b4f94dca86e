"""A launch script as its shell would run it: variables and their defaults, arrays, and the scripts that it sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from trimtab.files import read_small_text

_COMMENT = re.compile(r"(?m)(^|\s)#.*$")
_ARRAY = re.compile(r"(?m)^(\s*(?:\w+\s+)*?\w+\+?=)\(([^()]*(?:\$?\([^()]*\)[^()]*)*)\)")
_NAMED = re.compile(
    r"\s*(?:(?:export|local|readonly|declare(?:\s+-\w+)?)\s+)?((?:\w+\+?=(?:\"[^\"]*\"|'[^']*'|[^\s;\"']*)*[\s;]*)+)$"
)
_VALUE = re.compile(r"(\w+)(\+?)=((?:\"[^\"]*\"|'[^']*'|[^\s;\"']*)*)")
_SOURCE = re.compile(r"\s*(?:source|\.)\s+((?:\"[^\"]*\"|'[^']*'|[^\s;\"'])+)")
_FOLDER = re.compile(r"\$\(\s*dirname\s+[^()]*\)|`\s*dirname[^`]*`")
_CHANGED = re.compile(r"\$\(\s*cd\s+\"?([^()\"$\s]+)\"?[^()]*\bpwd[^()]*\)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?[-=]((?:[^{}]|\{[^{}]*\})*))?\}|(\w+))")
# Before the values of an array, which have spaces between them.
_OF_ARRAY = "\0"
# Of scripts that source one another.
_MOST_NESTED = 8


def expanded(path: Path) -> str:
    """The lines of a script with the values of its variables. Others stay as they are, with their `$`.

    Conditions are not followed: the last assignment before a line counts.

    Raises:
        InputError: if it can't be read.
    """
    variables: dict[str, str] = {}
    lines = list(_lines(path, variables, 0))
    # The shell may use an array in a way that is not known here. What the command says itself counts.
    return "\n".join([*(value for value in variables.values() if "--" in value), *lines])


def _lines(path: Path, variables: dict[str, str], depth: int) -> Iterator[str]:
    text = _COMMENT.sub("", read_small_text(path)).replace("\\\n", " ")
    # An array is one value, in quotes of its own.
    text = _ARRAY.sub(_as_one_value, text)
    for line in text.splitlines():
        line = _CHANGED.sub(r"\1", _FOLDER.sub(str(path.parent), line))
        if named := _NAMED.match(line):
            for name, adds, value in _VALUE.findall(named[1]):
                before = variables.get(name, "") if adds else ""
                filled = _filled(value.replace('"', "").replace("'", ""), variables)
                variables[name] = before + (filled.replace(_OF_ARRAY, " ") if adds else filled.replace(_OF_ARRAY, ""))
            continue
        line = _filled(line, variables)
        if (source := _SOURCE.match(line)) and depth < _MOST_NESTED:
            file = path.parent / source[1].replace('"', "").replace("'", "")
            if file.is_file():
                yield from _lines(file, variables, depth + 1)
            continue
        yield line


def _as_one_value(array: re.Match[str]) -> str:
    words = array[2].replace('"', " ").split()
    return f'{array[1]}"{_OF_ARRAY}{" ".join(words)}"'


def _filled(text: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if name in variables:
            return variables[name]
        return match[0] if default is None else _filled(default.strip("\"'"), variables)

    return _VARIABLE.sub(value, text)
