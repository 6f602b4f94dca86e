"""The lock has all that CI installs, with hashes; the page of licences is true to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from installation.lock import PAGE, PARTS, ROOT, licence_rows, locked, requirements

LOCKS = sorted((ROOT / ".ci").glob("lock-*.txt"))
# Of what users install. All allow use in products of any licence.
PERMISSIVE = re.compile(r"(Apache-2\.0( WITH LLVM-exception)?|0?BSD(-\d-Clause)?|BSL-1\.0|CC0-1\.0|CNRI-Python|ISC"
                        r"|MIT(-\w+)?|MPL-2\.0|PSF-2\.0|Unlicense|Zlib|AND|OR|[ ()])+")  # fmt: skip


def page_rows() -> list[tuple[str, ...]]:
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \| (\S+) \|$", PAGE.read_text(), re.MULTILINE)
    return [row for row in rows if row[0] not in ("package", "---")]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_every_package_has_a_hash_and_the_version_of_the_constraints(lock: Path) -> None:
    entries = lock.read_text().split("\n", 1)[1].removesuffix("\n")
    one = r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+"
    assert re.fullmatch(rf"{one}(\n{one})*", entries)
    versions = locked(lock)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert [name for name, version in pinned.items() if versions.get(canonicalize_name(name), version) != version] == []
    for requirement in [each for part in PARTS for each in requirements(part)]:
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)], prereleases=True)


def test_the_page_has_the_licence_of_every_package() -> None:
    rows = page_rows()
    assert {name: version for name, version, *_ in rows} == locked(LOCKS[0])
    assert [row for row in rows if row[3] not in PARTS.values() or not PERMISSIVE.fullmatch(row[2])] == []
    written = {row[:3] for row in rows}
    installed = {row[:3] for row in licence_rows(locked(LOCKS[0]))}
    assert installed <= written
