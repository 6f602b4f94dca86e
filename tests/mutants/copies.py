"""`copy_repository`: the files of the checkout, as they are now, in another folder; `copy_kernels`: its kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copy_repository(folder: Path) -> None:
    """Copy all files that git tracks or does not ignore, with their times; an old copy is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def copy_kernels(folder: Path, cache: Path) -> None:
    """Give a copy of the repository the kernels that are compiled for this one; numba keeps them by folder of source.

    Args:
        cache: numba's folder for all of them.
    """
    from numba.core.caching import UserProvidedCacheLocator

    for source in {path.parent.relative_to(ROOT) for path in (ROOT / "src").rglob("*.py")}:
        here, there = (
            cache / UserProvidedCacheLocator.get_suitable_cache_subpath(str(root / source / "any.py"))
            for root in (ROOT, folder)
        )
        if here.is_dir():
            shutil.copytree(here, there, dirs_exist_ok=True)
