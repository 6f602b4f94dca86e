"""Names in the list of tests that `make test` leaves out are those of tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mutants.function_map import OF_CHANGES
from nightly import RUN_BY_MAKE_TEST

TESTS = Path(__file__).parent


def test_mistakes_are_tried_on_the_tests_of_make_test() -> None:
    assert f"OF_CHANGES := {OF_CHANGES}\n" in (TESTS.parent / "Makefile").read_text()


def test_tests_of_the_list_exist() -> None:
    for name in RUN_BY_MAKE_TEST:
        file, _, test = name.partition("::")
        assert re.search(rf"^def {test}\(", (TESTS / file).read_text(), re.MULTILINE), name


def test_cases_of_the_list_exist(request: pytest.FixtureRequest) -> None:
    """Those of other files, if they are collected in this run."""
    chosen = request.config.option
    if chosen.keyword or "slow" in chosen.markexpr or any("::" in argument for argument in request.config.args):
        pytest.skip("not all tests of the files are collected")
    collected = {item.nodeid.removeprefix("tests/") for item in request.session.items}
    files = {name.partition("::")[0] for name in collected}
    wanted = {f"{name}[{case}]" for name, cases in RUN_BY_MAKE_TEST.items() for case in cases}
    assert not {name for name in wanted if name.partition("::")[0] in files} - collected
