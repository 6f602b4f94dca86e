import os, pytest
from pathlib import Path
from helpers.rank_pool import on_ranks
from helpers.trl_runs import train, worst
from helpers.equality import relative_error
from tests.integrations.test_trl import RUNS
import numpy as np
def body(tmp_path):
    run = RUNS["accumulation"]
    _, plain = train(run, tmp_path / "theirs", balanced=False)
    _, plain2 = train(run, tmp_path / "theirs2", balanced=False)
    _, bal = train(run, tmp_path / "mine", balanced=True)
    out = []
    for r in (plain2, bal):
        out.append((worst(r, plain), r.norms, plain.norms, r.losses, plain.losses))
        for step, (a, b) in enumerate(zip(r.gradients, plain.gradients)):
            out.append([(step, n, relative_error(g, b[n][0][h])) for n,(g,h) in a.items() if relative_error(g, b[n][0][h]) > 1e-12][:6])
    return out
@pytest.mark.parametrize("w", ["thread", "late", "early", "lazy"])
def test_trl(w, tmp_path: Path) -> None:
    for o in on_ranks(body, (tmp_path,), ranks=2, patched="trl", ways=w)[:1]:
        for x in o: print("OUT", w, x)
