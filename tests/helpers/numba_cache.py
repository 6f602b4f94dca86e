"""A folder of compiled kernels for each state of the source: they do not see changes of classes in other files."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "out" / "kernels"
# Folders that stay: of branches that take turns.
KEPT = 4


def cache_folder() -> Path:
    """The folder for the source as it is now; it exists. Older ones are removed."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(path.read_bytes())
    folder = FOLDER / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    folder.touch()
    for other in sorted(FOLDER.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(other, ignore_errors=True)
    return folder
