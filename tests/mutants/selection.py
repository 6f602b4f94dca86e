"""`Selection`: the tests on which a mistake is tried."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from mutants.copies import ROOT
from mutants.function_map import FunctionMap, block_at
from mutants.mutations import Mutation
from mutants.read_mistakes import said_of

# Processor seconds of the tests of a mistake together; and where kernels run as Python, many times slower.
SECONDS, SECONDS_AS_PYTHON = 30.0, 0.5
MOST_TESTS = 150
# Of a test, beside its own seconds.
LEAST_S = 0.1


class Selection:
    """Chooses tests that run the block in which a mistake is, or that call its function if none runs the block.

    In turns the most specific of them, which calls the fewest other functions, and the one that calls most functions of
    the mistake's folder for its seconds, such as a comparison of many whole results. One case of each test is tried
    before a second one of any. But a mistake for which someone has named a test is tried on that alone.
    """

    def __init__(self, functions: FunctionMap) -> None:
        self._functions = functions

    def tests_of(self, mutation: Mutation, *, as_python: bool = False) -> tuple[list[str], float]:
        """Tests, and the processor seconds that they took when they were recorded.

        Args:
            as_python: kernels are not compiled, so that only the quickest tests are of use, if there are any.
        """
        if (named := said_of(mutation)) in self._functions.functions:
            return ([], 0.0) if as_python else ([named], self._alone(named))
        block = block_at((ROOT / mutation.file).read_bytes(), mutation.function, mutation.line)
        callers = self._callers({f"{mutation.file}:{block}"}) or self._callers({f"{mutation.file}:{mutation.function}"})
        if mutation.is_kernel:
            callers = self._callers(self._functions_in({mutation.file})) | self._in_files_that_name(mutation)
        files = {mutation.file}
        while not (callers := callers or self._callers(self._functions_in(files))):
            importers = self._importers_of(files) - files
            if not importers:
                return [], 0.0
            files |= importers
        own, folder = f"test_{Path(mutation.file).stem}.py", "/".join(mutation.file.split("/")[:3])

        def specific(test: str) -> tuple[bool, int, float]:
            file = test.partition("::")[0]
            return Path(file).name != own, len(self._functions.functions[test]), self._alone(test)

        def broad(test: str) -> float:
            called = sum(name.startswith(folder) for name in self._functions.functions[test])
            return -called / (self._alone(test) + LEAST_S)

        chosen: list[str] = []
        made: dict[str, float] = {}
        left = limit = SECONDS_AS_PYTHON if as_python else SECONDS
        # Equal ones in the order of their names, so that every run chooses the same.
        tests = sorted(callers)
        turns = zip(*(_one_case_first(sorted(tests, key=order)) for order in (specific, broad)), strict=True)
        for test in dict.fromkeys(test for turn in turns for test in turn):
            fixtures = self._functions.fixtures[test]
            seconds = self._functions.seconds[test] + sum(s for name, s in fixtures.items() if name not in made)
            if len(chosen) < MOST_TESTS and (seconds <= left or not (chosen or as_python)):
                chosen.append(test)
                made |= fixtures
                left -= seconds
        return chosen, limit - left

    def _alone(self, test: str) -> float:
        """Processor seconds of a test with its fixtures."""
        return self._functions.seconds[test] + sum(self._functions.fixtures[test].values())

    def _importers_of(self, files: set[str]) -> set[str]:
        return {file for file, imported in self._imports.items() if imported & files}

    def _callers(self, functions: set[str]) -> set[str]:
        return {test for test, called in self._functions.functions.items() if called & functions}

    def _in_files_that_name(self, mutation: Mutation) -> set[str]:
        """Tests in files that import the module of a kernel and have its name: they may call it, which is not noted."""
        module = ".".join(Path(mutation.file).with_suffix("").parts[1:])
        words = [re.compile(rf"\b{re.escape(name)}\b") for name in (module, mutation.function)]
        named = {file for file, text in self._texts.items() if all(word.search(text) for word in words)}
        return {test for test in self._functions.functions if test.partition("::")[0] in named}

    @cached_property
    def _texts(self) -> dict[str, str]:
        """Of all test files."""
        files = {test.partition("::")[0] for test in self._functions.functions}
        return {file: (ROOT / file).read_text() for file in files}

    def _functions_in(self, files: Iterable[str]) -> set[str]:
        wanted = set(files)
        every: set[str] = set().union(*self._functions.functions.values())
        return {name for name in every if name.partition(":")[0] in wanted}

    @cached_property
    def _imports(self) -> dict[str, set[str]]:
        """The files of src that each of them imports."""
        modules: dict[str, str] = {}
        for path in (ROOT / "src").rglob("*.py"):
            place = path.relative_to(ROOT)
            modules[".".join(place.with_suffix("").parts[1:]).removesuffix(".__init__")] = str(place)
        imports: dict[str, set[str]] = {}
        for file in modules.values():
            names = set()
            for node in ast.walk(ast.parse((ROOT / file).read_bytes())):
                if isinstance(node, ast.ImportFrom):
                    names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
                elif isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
            imports[file] = {modules[name] for name in names if name in modules}
        return imports


def _one_case_first(tests: Iterable[str]) -> list[str]:
    """Tests in their order, but the first case of each before the second of any, and so on."""
    cases: Counter[str] = Counter()
    place = {}
    for test in tests:
        name = test.partition("[")[0]
        place[test] = cases[name]
        cases[name] += 1
    return sorted(place, key=place.__getitem__)
