"""Hook of MkDocs: adds the generated pages, and the README as the first page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from experiments.site.gallery import gallery
from experiments.site.reference_pages import first_page, reference_pages

ROOT = Path(__file__).parents[2]


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are not files."""
    pages = {"index.md": first_page((ROOT / "README.md").read_text(encoding="utf-8")), **reference_pages(), **gallery()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files
