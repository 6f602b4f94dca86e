"""Count a large trace on a Ray cluster whose machines see its files, and analyze it here. Needs ray.

python examples/analyze_on_ray.py 'out/dump/*.parquet' 16
"""

import sys

import ray

import trimtab
from trimtab.analysis import count_shard, merge, plan_counts


def analyze(trace: str, ranks: int, shards: int = 64) -> trimtab.AnalysisResult:
    plan = plan_counts(trace, ranks=ranks, shards=shards)
    shared, count = ray.put(plan), ray.remote(count_shard)
    waiting = [count.remote(shared, shard) for shard in range(len(plan.shards))]
    return trimtab.analyze(trace, trimtab.Run(ranks=ranks), counts=merge(plan, map(ray.get, waiting)))


if __name__ == "__main__":
    ray.init()
    print(analyze(sys.argv[1], int(sys.argv[2])))
