"""`copy_repository`: the files of the checkout, as they are now, in another folder; `copy_kernels`: its kernels."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
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


def copy_kernels(
    folder: Path, cache: Path, of: Path = ROOT, into: Path | None = None, stale: Iterable[str] = ()
) -> None:
    """Give a copy of the repository the kernels of another one; numba keeps them by folder of source.

    Args:
        cache: numba's folder for all of them.
        of: the copy that has them.
        into: numba's folder for the copy; `cache` by default.
        stale: files whose kernels are left out.
    """
    from numba.core.caching import UserProvidedCacheLocator

    for source in {path.parent.relative_to(ROOT) for path in (ROOT / "src").rglob("*.py")}:
        here, there = (
            root / UserProvidedCacheLocator.get_suitable_cache_subpath(str(owner / source / "any.py"))
            for root, owner in ((cache, of), (into or cache, folder))
        )
        # Files of kernels begin with the name of the source, and a point.
        left_out = {Path(file).stem for file in stale if Path(file).parent == source}
        for path in here.iterdir() if here.is_dir() else ():
            if path.name.partition(".")[0] not in left_out:
                there.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, there / path.name)
