"""`said_of`: what someone who read a mistake that no trial noticed said of it, in `read_mistakes.json`.

It is the name of a test, on which the mistake is tried from then on, or why the mistake changes no result.
`outdated_remarks`: those of lines that have changed since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from mutants.copies import ROOT
from mutants.mutations import Mutation, find_mutations, read_signatures

READ = Path(__file__).with_suffix(".json")


def said_of(mutation: Mutation) -> str:
    """A test's name, which begins with "tests/", or a reason; "" if nobody has read the mistake."""
    of_file = _read().get(mutation.file)
    return of_file.get(change_of(mutation, (ROOT / mutation.file).read_bytes()), "") if of_file else ""


def change_of(mutation: Mutation, source: bytes) -> str:
    """Its function, and lines before and after, which tell it from others of the file while these lines stay."""
    start = source.rfind(b"\n", 0, mutation.start) + 1
    end = source.find(b"\n", mutation.end)
    end = len(source) if end < 0 else end
    before = source[start:end]
    after = source[start : mutation.start] + mutation.new.encode() + source[mutation.end : end]
    old, new = (" ".join(text.decode().split()) for text in (before, after))
    return f"{mutation.function}: {old} -> {new}"


def outdated_remarks(files: Mapping[str, bytes]) -> list[str]:
    """Remarks on mistakes that can't be made in these files, because a line has changed."""
    signatures, outdated = read_signatures(files.values()), []
    for file, of_file in _read().items():
        source = files.get(file, b"")
        made = {change_of(mistake, source) for mistake in find_mutations(file, source, signatures)}
        outdated += [f"{file}: {change}" for change in of_file if change not in made]
    return outdated


@cache
def _read() -> dict[str, dict[str, str]]:
    read: dict[str, dict[str, str]] = json.loads(READ.read_text())
    return read
