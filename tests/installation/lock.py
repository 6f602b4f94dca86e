"""`make lock`: writes the packages that CI installs, with the hashes of their files, and the page of their licences.

The lock holds what `pip install -c constraints.txt -e '.[train,dev]'` takes on this machine, so it is named after
Python, system and processor. CI elsewhere installs by `constraints.txt` alone.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = ROOT / ".ci" / f"lock-{sys.implementation.cache_tag}-{sys.platform}-{platform.machine()}.txt"
PAGE = ROOT / "docs" / "licences.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# hatchling asks for editables when it is told what to build.
BUILD = [*PROJECT["build-system"]["requires"], "editables"]
# Parts of an installation by what they are for, the smallest first.
PARTS = {"": "laptop", "train": "`train`", "dev": "`dev`", "build": "build"}
# Of packages whose metadata names none: read in the file that the package ships.
READ = {"axe-playwright-python": "MIT AND MPL-2.0"}
# What metadata calls them.
LICENCES = {
    "Apache-2.0": r"Apache([ -]2\.0)?( Software)?( License)?(, Version 2\.0)?",
    "BSD-3-Clause": "3-Clause BSD License|BSD License",
    "ISC": "ISC License",
    "MIT": "MIT License",
    "MPL-2.0": r"Mozilla Public License 2\.0 \(MPL 2\.0\)",
    "PSF-2.0": "Python Software Foundation License",
}


def requirements(part: str) -> list[Requirement]:
    """The direct requirements of a part of an installation."""
    if part == "build":
        return [*map(Requirement, BUILD)]
    project = PROJECT["project"]
    return [*map(Requirement, project["optional-dependencies"][part] if part else project["dependencies"])]


def packages_of(part: str) -> Iterator[str]:
    """Yields the names of all packages that a part needs and that are installed here."""
    waiting, seen = requirements(part), set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, *requirement.extras) in seen:
            continue
        seen.add((name, *requirement.extras))
        try:
            needs = distribution(name).requires or ()
        except PackageNotFoundError:
            continue
        yield name
        for text in needs:
            needed = Requirement(text)
            wanted = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in wanted):
                waiting.append(needed)


def licence_of(package: Distribution) -> str:
    """The licence that a package's metadata names; "" if it names none in a few words."""
    metadata = package.metadata
    of_classifiers = [
        text.split(" :: ")[-1] for text in metadata.get_all("Classifier", ()) if text.startswith("License :: OSI")
    ]
    facts = metadata.json
    text = " ".join(str(facts.get("license") or "").split())
    named = str(facts.get("license_expression") or "") or (text if 0 < len(text) < 50 else " AND ".join(of_classifiers))
    named = named or READ.get(canonicalize_name(metadata["Name"]), "")
    return next((licence for licence, names in LICENCES.items() if re.fullmatch(names, named)), named)


def locked(lock: Path) -> dict[str, str]:
    """The versions in a lock, by package."""
    return {canonicalize_name(name): version for name, version in re.findall(r"^(\S+)==(\S+)", lock.read_text(), re.M)}


def licence_rows(versions: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Rows of the page for those of these packages that are installed here in this version; those of laptops first."""
    parts: dict[str, str] = {}
    for part, text in PARTS.items():
        for name in sorted({*packages_of(part)}):
            parts.setdefault(name, text)
    here = {name: distribution(name) for name in parts if name in versions}
    return [
        (name, versions[name], licence_of(package), parts[name])
        for name, package in here.items()
        if package.version.split("+")[0] == versions[name]
    ]


def _report() -> list[dict[str, Any]]:
    """What pip would install into an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    answer = subprocess.run(
        [*command, "-c", "constraints.txt", "-e", ".[train,dev]", *BUILD], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    return list(json.loads(answer.stdout)["install"])


def _hashes(package: Mapping[str, Any]) -> list[str]:
    """Of the file, and of an index's files if it was a build of this machine's own, such as `2.13.0+cpu`."""
    own = f"sha256:{package['download_info']['archive_info']['hashes']['sha256']}"
    version, _, local = package["metadata"]["version"].partition("+")
    if not local:
        return [own]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-deps", "-"]
    line = f"{package['metadata']['name']}=={version}"
    answer = subprocess.run(command, input=line, check=True, stdout=subprocess.PIPE, text=True)
    return [own, *re.findall(r"--hash=(\S+)", answer.stdout)]


def _lock_lines(packages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    yield "# Written by `make lock`, for the Python and machine in the name of this file."
    for package in sorted(packages, key=lambda each: canonicalize_name(each["metadata"]["name"])):
        name, version = package["metadata"]["name"], package["metadata"]["version"].split("+")[0]
        if name != "trimtab":
            yield " \\\n    ".join([f"{name}=={version}", *(f"--hash={value}" for value in _hashes(package))])


def main() -> None:
    LOCK.write_text("\n".join(_lock_lines(_report())) + "\n")
    versions = locked(LOCK)
    rows = licence_rows(versions)
    if unknown := {*versions} - {name for name, *_ in rows}:
        raise SystemExit(f"make lock: {LOCK.name} is new; install it (make clean lint) and repeat, for {unknown}")
    above = PAGE.read_text().partition("| package |")[0]
    table = [("package", "version", "licence", "part"), ("---",) * 4, *rows]
    PAGE.write_text(above + "".join(f"| {' | '.join(row)} |\n" for row in table))
    print(f"{LOCK.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}: {len(versions)} packages")


if __name__ == "__main__":
    main()
