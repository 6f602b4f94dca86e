"""Counting a trace in several processes of this machine, each with one shard of its files at a time."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context

from trimtab.analysis.trace_counts import CountPlan, ShardCounts, TraceCounts, count_shard, merge
from trimtab.interrupts import interrupts_later, take_interrupts


def count_in_processes(plan: CountPlan, jobs: int, progress: Callable[[int, int], None]) -> TraceCounts:
    """Returns the counts of all shards of a plan, equal to those of one process.

    Memory: a chunk and the counts of each process, and twice the counts here.

    Args:
        jobs: processes. They import the main script, which therefore needs `if __name__ == "__main__"`.
        progress: called with the number of shards counted and in total.

    Raises:
        InputError: as `count_shard` and `merge`.
        MemoryError: if the system ended a process.
    """

    def counted() -> Iterator[ShardCounts]:
        end_quietly = partial(take_interrupts, signal.SIG_DFL)
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=end_quietly) as pool:
            try:
                with interrupts_later():
                    waiting = {pool.submit(count_shard, plan, shard) for shard in range(len(plan.shards))}
                for done, future in enumerate(as_completed(list(waiting)), start=1):
                    # Its counts are let go when the next are received.
                    waiting.discard(future)
                    yield future.result()
                    progress(done, len(plan.shards))
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    try:
        return merge(plan, counted())
    except BrokenProcessPool:
        raise MemoryError(f"the system ended a process that counted {plan.name}; give fewer --jobs") from None
