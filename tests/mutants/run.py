"""`make mutants`: makes single mistakes in the source, drawn at random, and counts those that no test notices.

    python tests/mutants/run.py --count 200 --seed 1

How a mistake is tried, and what its outcomes mean, is in docs/testing.md.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.processor_time import NO_PROGRESS, TOO_LONG
from mutants.copies import ROOT, copy_repository
from mutants.function_map import MAP, FunctionMap
from mutants.mutations import Mutation, find_mutations, read_signatures
from mutants.read_mistakes import READ, outdated_remarks, said_of
from mutants.selection import Selection
from mutants.trial import Trial

FIGURES = ROOT / "docs" / "benchmarks" / "mutants.json"
PAGE = ROOT / "docs" / "testing.md"
WORKERS = 2
POLL_S = 0.2
NOTICED, NO_CHANGE = ("killed", "no end"), "no change"
OUTCOMES = (*NOTICED, NO_CHANGE, "undecided", "survived")
# Tests without the mistake use less than one part in so many of the limit if a mistake that exceeds it has no end.
SHARE = 3.0


@dataclass(frozen=True)
class Result:
    """What became of a mistake: one of `OUTCOMES`, with the reason where there is one."""

    mutation: Mutation
    outcome: str
    reason: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        return f"{self.outcome}{because}: {self.mutation}"


def draw(count: int, seed: int, only: str = "") -> list[Mutation]:
    """Mistakes drawn at random from all of src, or from the files whose path contains `only`."""
    return draw_from(_sources(), count, seed, only)


def _sources() -> dict[str, bytes]:
    return {str(path.relative_to(ROOT)): path.read_bytes() for path in sorted((ROOT / "src").rglob("*.py"))}


def draw_from(files: Mapping[str, bytes], count: int, seed: int, only: str = "") -> list[Mutation]:
    """Mistakes drawn from files, by their paths.

    Each has its own random number, from the seed, its file's name, its function and its text; the lowest are drawn. So
    a change of other code leaves a draw as it is, but for a mistake or two.
    """
    signatures = read_signatures(files.values())
    lots: dict[bytes, Mutation] = {}
    for file, source in files.items():
        if only in file:
            equal: Counter[str] = Counter()
            for m in find_mutations(file, source, signatures):
                name = "\n".join((Path(file).name, m.function, m.kind, m.old, m.new))
                lots[hashlib.sha256(f"{seed}\n{name}\n{equal[name]}".encode()).digest()] = m
                equal[name] += 1
    return [lots[lot] for lot in sorted(lots)[:count]]


class Trials:
    """The trials of one mistake, one after the other.

    Attributes:
        result: as soon as there is one.
    """

    def __init__(self, mutation: Mutation, selection: Selection) -> None:
        self.result: Result | None = None
        self._mutation, self._selection = mutation, selection
        self._as_python = mutation.is_kernel
        self._failure, self._limit_s, self._seconds = "", 0.0, 0.0
        self._tests: list[str] = []
        self._choose()

    def next(self, copy: Path) -> Trial:
        """The next trial, on a copy of the repository."""
        is_compiled = self._mutation.is_kernel and not self._as_python
        return Trial(
            copy, self._mutation, self._tests, self._expected_s, compiled=is_compiled, mistaken=not self._is_control
        )  # fmt: skip

    def take(self, outcome: str, trial: Trial) -> None:
        """Take the outcome of the last trial."""
        self._seconds += trial.used_s
        if not trial.mistaken:
            self._is_control = False
            self._expected_s = trial.used_s
            took_long = self._failure.startswith(TOO_LONG)
            if outcome != "survived" and self._as_python:
                self._compile()
            elif self._failure == "killed":
                self._end("killed")
            elif outcome != "survived":
                self._end("undecided", f"without the mistake: {outcome} {trial.failed_test()}")
            elif took_long and trial.used_s <= self._limit_s / SHARE:
                self._end("no end", f"{self._failure}, {trial.used_s:.0f} s without the mistake")
        elif outcome == "survived" and self._as_python:
            self._compile()
        elif outcome == "survived" or (outcome == "killed" and not self._as_python):
            self._end(outcome)
        elif not self._failure:
            self._failure, self._limit_s, self._is_control = outcome, trial.limit_s, True
            if outcome == "killed":
                # Some tests fail as Python, where integers may overflow or booleans can't be subtracted.
                failed = f"{trial.failed_test()} - "
                self._tests = [test for test in self._tests if failed.startswith(f"FAILED {test} - ")] or self._tests
        elif outcome.startswith((TOO_LONG, NO_PROGRESS)) and self._failure.startswith((TOO_LONG, NO_PROGRESS)):
            self._end("no end", outcome)
        else:
            # The same failure at set-up or before it, or the same crash, twice is no accident.
            self._end("killed" if outcome == self._failure else "undecided", outcome)

    def _compile(self) -> None:
        """Go on with compiled kernels: most mistakes in kernels show without compiling them."""
        self._as_python, self._failure = False, ""
        self._choose()

    def _choose(self) -> None:
        self._is_control = False
        self._tests, self._expected_s = self._selection.tests_of(self._mutation, as_python=self._as_python)
        if not self._tests and self._as_python:
            self._compile()
        elif not self._tests:
            self._end("survived", "no test calls it")

    def _end(self, outcome: str, reason: str = "") -> None:
        if outcome == "survived" and (said := said_of(self._mutation)) and not said.startswith("tests/"):
            outcome, reason = NO_CHANGE, said
        self.result = Result(self._mutation, outcome, reason, self._seconds)


def try_all(mutations: Sequence[Mutation], selection: Selection) -> list[Result]:
    """Try mistakes on `WORKERS` copies of the repository."""
    results: list[Result] = []

    def end(result: Result) -> None:
        results.append(result)
        print(f"{len(results):4d}/{len(mutations)} {result.seconds:5.1f} s  {result}", flush=True)

    free = [MAP.parent / f"copy-{worker}" for worker in range(WORKERS)]
    for copy in free:
        copy_repository(copy)
    waiting = deque(Trials(mutation, selection) for mutation in mutations)
    running: list[tuple[Path, Trials, Trial]] = []
    while waiting or running:
        while waiting and free:
            if result := (trials := waiting.popleft()).result:
                end(result)
            else:
                copy = free.pop()
                running.append((copy, trials, trials.next(copy)))
        for place in list(running):
            copy, trials, trial = place
            if (outcome := trial.result()) is None:
                continue
            trial.close()
            running.remove(place)
            free.append(copy)
            trials.take(outcome, trial)
            waiting.appendleft(trials)
        time.sleep(POLL_S)
    return results


def package_of(mutation: Mutation) -> str:
    """The folder of the package in which a mistake is."""
    parts = mutation.file.split("/")
    return parts[2] if len(parts) > 3 else "."


def summarise(results: Sequence[Result]) -> dict[str, dict[str, int]]:
    """Numbers of outcomes by package, and in all."""
    packages = sorted({package_of(result.mutation) for result in results})
    table = {
        package: dict(Counter(r.outcome for r in results if package_of(r.mutation) == package)) for package in packages
    }
    return table | {"all": dict(Counter(result.outcome for result in results))}


def not_noticed(counts: Mapping[str, int]) -> str:
    """The share that was not noticed, of the mistakes that change something."""
    total = sum(counts.get(outcome, 0) for outcome in OUTCOMES if outcome != NO_CHANGE)
    noticed = sum(counts.get(outcome, 0) for outcome in NOTICED)
    return f"{1 - noticed / total:.0%}" if total else "-"


def figures_of(results: Sequence[Result], minutes: float) -> dict[str, Any]:
    """What is stored of a run: the numbers, and the mistakes that were not noticed."""
    left = sorted(str(result) for result in results if result.outcome not in NOTICED)
    return {"minutes": round(minutes, 1), "packages": summarise(results), "not_noticed": left}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="number of mistakes (default 200)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default 1)")
    parser.add_argument("--only", default="", metavar="TEXT", help="draw from files whose path contains it")
    parser.add_argument("--page", action="store_true", help=f"put the figures into {FIGURES.name} and {PAGE.name}")
    options = parser.parse_args()
    lock = _lock()
    for remark in outdated_remarks(_sources()):
        print(f"{READ.name} has a remark on a line that has changed: {remark}", flush=True)
    start = time.perf_counter()
    functions = FunctionMap()
    if missing := functions.missing():
        print(f"recording which functions the tests of {len(missing)} files call", flush=True)
        functions.record(missing, WORKERS)
        functions = FunctionMap()
        print(f"recorded in {(time.perf_counter() - start) / 60:.1f} minutes, in {MAP.relative_to(ROOT)}", flush=True)
    mutations = draw(options.count, options.seed, options.only)
    _import_others()
    start = time.perf_counter()
    results = try_all(mutations, Selection(functions))
    minutes = (time.perf_counter() - start) / 60
    table = summarise(results)
    for package, counts in table.items():
        print(f"{package:14} {not_noticed(counts)} not noticed")
    for result in sorted(results, key=lambda result: str(result.mutation)):
        if result.outcome != "killed":
            print(result)
    print(f"{len(results)} mistakes tried in {minutes:.1f} minutes")
    if options.page:
        figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
        figures[str(options.seed)] = figures_of(results, minutes)
        _write_page(dict(sorted(figures.items())))
    os.close(lock)
    return 0


def _lock() -> int:
    """Lock the copies of this checkout, in which another run would leave its mistakes, until the file is closed."""
    MAP.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(MAP.parent / "lock", os.O_WRONLY | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"another run uses the copies in {MAP.parent}") from None
    return lock


def table_of(figures: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the page's table: packages over all seeds, and each seed."""
    lines: dict[str, Counter[str]] = {}
    for seed, run in figures.items():
        names = {"all": f"all, seed {seed}", ".": "files of the package itself"}
        for package, counts in run["packages"].items():
            name = names.get(package, f"`{package}/`")
            lines.setdefault(name, Counter()).update(counts)
    if figures:
        lines["all"] = sum((Counter(run["packages"]["all"]) for run in figures.values()), Counter())
    header = ["folder", "mistakes", *OUTCOMES, "not noticed"]
    return header, [
        [name, str(counts.total()), *(str(counts[outcome]) for outcome in OUTCOMES), not_noticed(counts)]
        for name, counts in sorted(lines.items(), key=lambda line: (line[0].startswith("all"), line[0]))
    ]  # fmt: skip


def _write_page(figures: Mapping[str, Any]) -> None:
    # Trials import Trimtab from their copies, so it is not imported before them.
    sys.path.insert(0, str(ROOT))
    from experiments.page_tables import markdown_table, replace_tables

    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    replace_tables({"mistakes": markdown_table(*table_of(figures))}, PAGE)


def _import_others() -> None:
    """Import what is not ours, once for all trials."""
    import hypothesis  # noqa: F401
    import megatron.core.models.gpt.gpt_model  # noqa: F401
    import numba  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
