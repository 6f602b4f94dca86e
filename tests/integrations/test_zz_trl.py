import os, pytest
from pathlib import Path
from helpers.rank_tests import runs_on_ranks
from tests.integrations.test_trl import RUNS, check_with_moves
W = os.environ.get("W", "thread lazy")
@pytest.mark.parametrize("name", ["accumulation", "reentrant checkpointing"])
@runs_on_ranks(2, "trl", ways=W)
def test_trl(name: str, tmp_path: Path) -> None:
    check_with_moves(RUNS[name], tmp_path)
