"""`make mutants`: makes single mistakes in the source, one after another, and checks that tests fail.

The `.toml` files beside it list the mistakes, *mutants*, by package. Each names the tests that must fail. Mutants are
made in copies of the repository, one copy for each worker. The tests of all mutants have to pass in an unchanged copy
first. Words on the command line choose mutants by name:

    python tests/mutants/run.py eplb
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
WORKERS = 2
TIMEOUT_S = 180
# What pytest returns if tests failed.
FAILED = 1


@dataclass(frozen=True)
class Mutant:
    """A single change to a file.

    Attributes:
        name: what the mistake is.
        file: the file, from the repository's root.
        old, new: text that occurs once in the file, and what replaces it.
        tests: pytest's ids of tests. All of them must fail.
        jit: compile kernels; without, they run as Python. Of use where the tests need many loads.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    jit: bool = False

    def apply(self, root: Path) -> None:
        """Change the file in a copy of the repository."""
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))

    def problem(self, root: Path) -> str:
        """Why it can't be applied; "" if it can."""
        path = root / self.file
        if not path.is_file():
            return f"{self.file} does not exist"
        found = path.read_text().count(self.old)
        if found != 1:
            return f"`old` occurs {found} times in {self.file}, not once"
        if self.old == self.new:
            return "`new` equals `old`"
        missing = [test for test in self.tests if not _has_test(root, test)]
        return f"{missing[0]} does not exist" if missing else "" if self.tests else "it names no tests"


def load_mutants(folder: Path = FOLDER) -> list[Mutant]:
    """The mutants of all files."""
    return [
        Mutant(**{**values, "tests": tuple(values["tests"])})
        for path in sorted(folder.glob("*.toml"))
        for values in tomllib.loads(path.read_text())["mutant"]
    ]


def _has_test(root: Path, test: str) -> bool:
    file, _, name = test.partition("::")
    path = root / file
    return path.is_file() and f"def {name.partition('[')[0]}(" in path.read_text()


class Copies:
    """Copies of the repository's files, for `WORKERS` threads."""

    def __init__(self, folder: Path) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
            capture_output=True, text=True,
        ).stdout  # fmt: skip
        files = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
        for worker in range(WORKERS):
            copy = folder / f"copy-{worker}"
            for name in files:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
            self._free.put(copy)

    def result(self, mutant: Mutant) -> str:
        """What the tests show of a mutant: "killed", or what went wrong."""
        copy = self._free.get()
        path = copy / mutant.file
        try:
            mutant.apply(copy)
            for test in mutant.tests:
                ended = self._run(copy, [test], jit=mutant.jit)
                if ended != FAILED:
                    return f"{test} {_meaning(ended)}"
            return "killed"
        finally:
            shutil.copy2(ROOT / mutant.file, path)
            self._free.put(copy)

    def failure_without(self, tests: Sequence[str], *, jit: bool) -> str:
        """The failure of tests in an unchanged copy; "" if they pass."""
        copy = self._free.get()
        try:
            ended = self._run(copy, tests, jit=jit, timeout_s=len(tests) * TIMEOUT_S)
            return f"without a mutant, a test {_meaning(ended)}: {' '.join(tests)}" if ended else ""
        finally:
            self._free.put(copy)

    @staticmethod
    def _run(copy: Path, tests: Iterable[str], *, jit: bool, timeout_s: float = TIMEOUT_S) -> int | None:
        """The exit status of pytest; None if it ran too long."""
        environment = os.environ | {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        # Compiled code in a cache of its own: numba does not see changes of functions in other files.
        with tempfile.TemporaryDirectory() as cache:
            environment |= {"NUMBA_CACHE_DIR": cache} if jit else {"NUMBA_DISABLE_JIT": "1"}
            # Examples are the same in every run: a mutant that was killed once is killed again.
            options = ["-x", "-p", "no:cacheprovider", "--hypothesis-profile=ci"]
            command = [sys.executable, "-m", "pytest", *options, *tests]
            running = subprocess.Popen(
                command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            try:
                return running.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                # With the ranks that the tests have started, also if these have ended.
                with suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
                running.wait()


def _parts(tests: Iterable[str]) -> list[list[str]]:
    """Tests for each worker; those of one file together, since they share fixtures."""
    by_file: dict[str, list[str]] = {}
    for test in sorted(tests):
        by_file.setdefault(test.partition("::")[0], []).append(test)
    files = list(by_file.values())
    parts = [[test for file in files[worker::WORKERS] for test in file] for worker in range(WORKERS)]
    return [part for part in parts if part]


def _meaning(ended: int | None) -> str:
    meanings = {0: "passed", None: f"ran for more than {TIMEOUT_S} s", FAILED: "failed"}
    return meanings.get(ended, f"did not run: pytest ended with status {ended}")


def results_of(mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, str, float]]:
    """Each mutant with its result and seconds, in order."""
    with tempfile.TemporaryDirectory() as folder:
        copies = Copies(Path(folder))

        def timed(mutant: Mutant) -> tuple[str, float]:
            start = time.perf_counter()
            return copies.result(mutant), time.perf_counter() - start

        with ThreadPoolExecutor(WORKERS) as pool:
            checks = [
                pool.submit(copies.failure_without, part, jit=jit)
                for jit in (False, True)
                for part in _parts({test for mutant in mutants if mutant.jit == jit for test in mutant.tests})
            ]
            failures = [failure for check in checks if (failure := check.result())]
            if failures:
                raise SystemExit(failures[0])
            for mutant, (result, seconds) in zip(mutants, pool.map(timed, mutants), strict=True):
                yield mutant, result, seconds


def main(words: Sequence[str]) -> int:
    """Run the mutants whose names have a word in them; 1 if a test passes."""
    console = Console(highlight=False)
    every = load_mutants()
    mutants = [mutant for mutant in every if not words or any(word in mutant.name for word in words)]
    problems = [f"{mutant.name}: {mutant.problem(ROOT)}" for mutant in every if mutant.problem(ROOT)]
    if problems or not mutants:
        console.print(*(problems or [f"no mutant has {' or '.join(words)} in its name"]), sep="\n")
        return 2
    start, survivors = time.perf_counter(), 0
    for mutant, result, seconds in track(results_of(mutants), "mutants", total=len(mutants), transient=True):
        survivors += result != "killed"
        console.print(f"{seconds:5.1f} s  {mutant.name}: {result}", markup=False)
    minutes = (time.perf_counter() - start) / 60
    console.print(f"{len(mutants) - survivors} of {len(mutants)} mutants killed in {minutes:.1f} minutes")
    return int(survivors > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="run the mutants whose names have one of these words")
    sys.exit(main(parser.parse_args().words))
