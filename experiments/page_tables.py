"""Tables of a Markdown page that commands rewrite, each between `<!-- figures: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trimtab.errors import InputError
from trimtab.files import write_atomically

_BLOCK = re.compile(r"<!-- figures: (?P<name>[a-z-]+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)


def read_page(path: Path) -> str:
    """Text of a page with places for tables. Raises InputError if there is no such file."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; the page should be there, with a place for each table")
    return path.read_text(encoding="utf-8")


def tables_of_page(page: str) -> dict[str, str]:
    """The tables of a page, by name."""
    return {match["name"]: match["body"].strip() for match in _BLOCK.finditer(page)}


def replace_tables(tables: Mapping[str, str], path: Path) -> None:
    """Replace tables of a page by name; others stay.

    Raises:
        InputError: if there is no such page, or it has no place for a table.
    """
    page = read_page(path)
    missing = tables.keys() - tables_of_page(page).keys()
    if missing:
        raise InputError(f"{path}: there is no '<!-- figures: {min(missing)} -->', with '<!-- end -->' after it")

    def replaced(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- figures: {name} -->\n{tables[name]}\n<!-- end -->" if name in tables else match[0]

    write_atomically(path, _BLOCK.sub(replaced, page))


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; all columns but the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
