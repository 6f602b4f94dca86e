import os, pytest
from helpers.rank_pool import on_ranks
from helpers.megatron_runs import Layout, MegatronCase, compare_runs
W = os.environ.get("W", "thread lazy")
CASES = {"replicas": MegatronCase(double=True, recompute="uniform"), "grouped": MegatronCase(grouped=True, double=True), "live": MegatronCase(1, double=True, live="quota")}
@pytest.mark.parametrize("c", CASES)
def test_meg(c): 
    r = on_ranks(compare_runs, (Layout(2,2), [CASES[c]]), ranks=2, patched="megatron", ways=W)
    print(r); assert max(map(max,r)) < 1e-12
