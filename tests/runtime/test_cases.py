"""Any training loop equals one process, or its calls are refused by name: random cases, see `helpers.cases`.

Every pair of values of two dimensions occurs, in `make nightly` in other cases each night. A case that fails is named
by its line, which goes to `failed_cases.txt`, and alone runs with

    cd tests; python -m helpers.programs "LINE"
"""

from __future__ import annotations

import traceback
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from helpers.cases import DIMENSIONS, VALUES, Case, draw, pairs
from helpers.programs import run

FAILED = Path(__file__).with_name("failed_cases.txt").read_text().splitlines()
LINES = [*map(str, draw(seed=1)), *FAILED]


@pytest.mark.parametrize("line", LINES, ids=[line.split(",")[0] for line in LINES])
def test_case_equals_one_process(line: str) -> None:
    case = Case.parse(line)
    metrics, options = run(case), case.options
    is_planned = options.planner == "random" and options.rows != "unread"
    if not is_planned or options.order == "any" or options.between == "other session":
        return
    moved = sum(each[f"transfer/{kind}_bytes"] for each in metrics for kind in ("peer", "host"))
    if options.mode in ("shadow", "off") or options.settings.get("slots_per_rank") == 0:
        assert moved == 0
    elif options.mode != "live" or case.seed % 2:
        # Random plans and choices have replicas.
        assert moved > 0


def test_every_pair_of_values_occurs() -> None:
    occur = np.zeros((len(VALUES), len(VALUES)), bool)
    for case in draw(seed=1):
        usual = {name: next(iter(values)) for name, values in DIMENSIONS.items()}
        chosen = [VALUES.index(each) for each in (usual | dict(case.chosen)).items()]
        occur[np.ix_(chosen, chosen)] = True
    assert occur[pairs()].all()


@pytest.mark.nightly
def test_cases_of_today() -> None:
    failed: list[str] = []
    for case in draw(seed=date.today().toordinal()):
        try:
            run(case)
        except AssertionError:
            failed.append(f"{case}\n{traceback.format_exc()}")
    assert not failed, "\n\n".join(failed)
