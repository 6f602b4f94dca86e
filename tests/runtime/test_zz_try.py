import os, pytest
from helpers.rank_pool import on_ranks
from helpers.equality import Case, compare_cases
from helpers.live_runs import LiveCase, compare_live
from helpers import any_loop
from helpers.any_loop import *
import dataclasses

def loops(run):
    loop = start()
    forward(loop, 0, run, 0)
    forward(loop, 1, run, 1)
    live(loop, 7, run, 2)
    backward(loop, 0)
    forward(loop, 2, run, 3)
    backward(loop, 2)
    backward(loop, 1)
    forward(loop, 0, run)
    backward(loop, 3)
    finish(loop)
    step(loop)

W = os.environ.get("W", "thread lazy peers")
def test_eq(): on_ranks(compare_cases, ([Case(s) for s in range(2, 6)],), ranks=2, ways=W)
def test_live(): on_ranks(compare_live, ([LiveCase(s, p, at_once=s%2==0, run_block="checkpoint") for s, p in enumerate(("quota","feplb","predict"))],), ranks=2, ways=W)
@pytest.mark.parametrize("run", ["checkpoint", "reentrant checkpoint"])
def test_loop(run): on_ranks(loops, (run,), ranks=2, ways=W)
