"""`make test-install`: installs Trimtab as users do, and runs README's laptop commands, on every Python of the machine.

    python tests/installation/run.py --python 3.12 --form oldest

Each case has an empty environment, `env -i`, a new HOME and a folder with a space in its name, and no constraints of
ours. The built wheel is installed with the newest and with the oldest dependencies that it allows and that have a wheel
for this Python; README's own line installs a clone. README's commands run as they are written. Everything that
`--json -` prints has to be JSON, and plans have to be equal in all cases.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.response_dumps import json_lines, npy_text, routes

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
FORMS = ("newest", "oldest", "README")
UV = [sys.executable, "-m", "uv"]
# How packages are reached.
KEPT = re.compile(r"(PIP|UV)_.*|.*_proxy|SSL_CERT_.*|CURL_CA_BUNDLE", re.IGNORECASE)
# README's figure may differ from the measured one by this fraction.
SIZE_TOLERANCE = 0.15


class CaseError(Exception):
    """A command of a case did not do what it should."""


def readme_lines() -> tuple[str, list[str]]:
    """The line that installs, and the commands after it: all that begin with `.venv/bin/trimtab`."""
    text = (ROOT / "README.md").read_text()
    [install] = re.findall(r"^python3 -m venv \.venv && .*$", text, re.MULTILINE)
    commands = re.findall(r"^ *`?(\.venv/bin/trimtab [^`\n]*)", text, re.MULTILINE)
    if len(commands) < 4:
        raise SystemExit(f"README has {len(commands)} commands that begin with .venv/bin/trimtab; expected at least 4")
    return install, commands


def readme_megabytes() -> int:
    """What README says that an installation takes."""
    [megabytes] = re.findall(r"without torch \(about (\d+) MB", (ROOT / "README.md").read_text())
    return int(megabytes)


def find_python(version: str) -> Path | None:
    """The interpreter of a version on this machine, on PATH or of pyenv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = shutil.which(f"python{version}")
    for path in [*([on_path] if on_path else []), *pyenv.glob(f"versions/{version}.*/bin/python3")]:
        # A shim of pyenv may start nothing.
        asked = "import sys; print(sys.executable)"
        told = subprocess.run([str(path), "-c", asked], capture_output=True, text=True)
        if told.returncode == 0:
            return Path(told.stdout.strip())
    return None


class Case:
    """A folder in which commands run as for a new user.

    Args:
        folder: empty, or a clone.
        python: of the environment.
    """

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        around = folder.parent
        (around / "home").mkdir()
        (around / "bin").mkdir()
        (around / "bin" / "python3").symlink_to(python)
        kept = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
        self._environment = kept | {"HOME": str(around / "home"), "PATH": f"{around / 'bin'}:/usr/bin:/bin"}

    def run(self, line: str, *, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a line of shell. Raises CaseError if it ends with another status."""
        result = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if result.returncode != status:
            raise CaseError(f"{line}\nended with status {result.returncode}:\n{result.stdout}{result.stderr}")
        return result

    def json_of(self, line: str) -> Any:
        """The figures of a command that ends with `--json -`."""
        printed = self.run(line).stdout
        try:
            return json.loads(printed)
        except ValueError as error:
            raise CaseError(f"{line}\nprints no JSON ({error}):\n{printed[:500]}") from None

    def size(self) -> int:
        """Bytes of the installed packages, without those that the environment began with, before anything ran."""
        [packages] = (self.folder / ".venv" / "lib").glob("python*/site-packages")
        folders = [each for each in packages.iterdir() if not each.name.startswith(("pip", "setuptools"))]
        files = [file for each in folders for file in ([each] if each.is_file() else each.rglob("*"))]
        return sum(file.lstat().st_blocks * 512 for file in files)


def dependencies() -> list[str]:
    """What pyproject.toml asks for."""
    needed: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return needed


def install_line(form: str, wheel: Path) -> str:
    """Installs the wheel into `.venv`."""
    if form == "oldest":
        uv = [*UV, "pip", "install", "--quiet", "--resolution", "lowest-direct", "--only-binary", ":all:"]
        return shlex.join([*uv, "--python", ".venv/bin/python", *dependencies(), str(wheel)])
    return f".venv/bin/pip install --quiet --only-binary :all: {shlex.quote(str(wheel))}"


def check_versions(installed: Mapping[str, str], form: str, python: str) -> str:
    """The installed versions as text. Raises CaseError if the oldest Python has not the lowest that are allowed."""
    bounds = dict(text.split(">=") for text in dependencies())
    found = {name: installed[name] for name in bounds}
    if form == "oldest" and python == PYTHONS[0]:
        higher = [name for name, bound in bounds.items() if _trimmed(found[name]) != _trimmed(bound)]
        if higher:
            raise CaseError(f"{higher} have {[found[name] for name in higher]}, which are not the lowest allowed")
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _trimmed(version: str) -> str:
    return re.sub(r"(\.0)+$", "", version)


def check(case: Case, python: str, form: str, wheel: Path) -> Iterator[str]:
    """Install, and run everything. Yields what there is to tell."""
    install, commands = readme_lines()
    case.run(install if form == "README" else f"python3 -m venv .venv && {install_line(form, wheel)}")
    megabytes = case.size() / 1e6
    if form != "oldest" and abs(megabytes / readme_megabytes() - 1) > SIZE_TOLERANCE:
        raise CaseError(f"the packages take {megabytes:.0f} MB; README says {readme_megabytes()} MB")
    yield f"{megabytes:.0f} MB"
    packages = json.loads(case.run(".venv/bin/pip list --format json --disable-pip-version-check").stdout)
    yield check_versions({each["name"]: each["version"] for each in packages}, form, python)

    dump = ({"object": "text_completion", "choices": [choice(index)]} for index in range(32))
    json_lines(case.folder / "rollout.jsonl", dump)
    for line in commands:
        case.run(line)
    written = [word for line in commands for word in shlex.split(line) if word.startswith("out/")]
    missing = [name for name in written if not (case.folder / name).is_file()]
    if missing:
        raise CaseError(f"README's commands did not write {missing}")
    # README's own, with figures instead of pages.
    for line in commands:
        if "--html" in line:
            case.json_of(re.sub(r"--html \S+", "--json -", line))
    plan = ".venv/bin/trimtab plan out/rollout.parquet --ranks 16 --token-budget 4096"
    case.json_of(".venv/bin/trimtab trace info out/rollout.parquet --json -")
    figures = case.json_of(f"{plan} --json -")
    yield f"plan {figures['plan_hash']}"


def choice(seed: int) -> dict[str, Any]:
    """A response of vLLM's server for qwen3-30b-a3b."""
    ids = routes(100 + seed, 48, 8, 128, "u1", seed=seed)
    tokens = list(range(len(ids) + 1))
    return {"index": 0, "prompt_token_ids": tokens[:9], "token_ids": tokens[9:], "routed_experts": npy_text(ids)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--form", nargs="+", choices=FORMS, default=FORMS)
    options = parser.parse_args(arguments)
    pythons = {version: find_python(version) for version in options.python}
    found = {version: path for version, path in pythons.items() if path}
    for version in pythons.keys() - found.keys():
        print(f"Python {version}: not tried, this machine has no interpreter")
    passed, failed, plans = 0, 0, set()
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([*UV, "build", "--quiet", "--wheel", "--out-dir", scratch, ROOT], check=True)
        [wheel] = Path(scratch).glob("*.whl")
        for version, interpreter in found.items():
            for form in options.form:
                start, name = time.perf_counter(), f"Python {version}, {form}"
                folder = Path(scratch) / name / "a folder with a space"
                folder.mkdir(parents=True)
                if form == "README":
                    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
                try:
                    told = [*check(Case(folder, interpreter), version, form, wheel)]
                except CaseError as error:
                    failed += 1
                    print(f"{name}: FAILED\n{error}", flush=True)
                    continue
                passed += 1
                plans.add(told[-1])
                print(f"{name}: {'; '.join(told)}; {time.perf_counter() - start:.0f} s", flush=True)
    if len(plans) > 1:
        failed += 1
        print(f"plans differ: {', '.join(sorted(plans))}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
