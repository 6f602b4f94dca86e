"""Communication kernels of all ranks end, however few hardware queues their streams share: see `hardware_queues`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from helpers import late_device
from helpers.hardware_queues import Work, blocked, recording
from helpers.planned_steps import Step, make
from helpers.random_plans import random_plan
from helpers.rank_pool import on_ranks
from helpers.transfer_mutants import mutated

CONNECTIONS, RESIDENT = range(1, 9), (1, 2, 4)


def kernel(stream: int, name: str, *peers: int) -> Work:
    return Work(stream, kernels=((name,),), peers=tuple((rank, (name,)) for rank in peers))


def test_kernels_in_opposite_orders_block_each_other_only_without_room() -> None:
    first, second = [kernel(0, "a", 1), kernel(1, "b", 1)], [kernel(1, "b", 0), kernel(0, "a", 0)]
    for connections in CONNECTIONS:
        # One of each spins, the other one is the head of a queue.
        assert len(blocked([first, second], connections, 1)) == 4
        assert not blocked([first, second], connections, 2)


def test_work_that_waits_holds_up_its_queue() -> None:
    """A wait that another rank's kernel would end, in front of the kernel that this one needs."""
    ranks = [[kernel(0, "a", 1), Work(1, after=(0, 1)), kernel(2, "b", 1)], [kernel(2, "b", 0), kernel(3, "a", 0)]]
    assert blocked(ranks, 1, 2) == []
    assert blocked([ranks[0], [kernel(2, "b", 0), Work(3, after=(2, 1)), kernel(3, "a", 0)]], 1, 2)
    assert not blocked([ranks[0], [kernel(2, "b", 0), Work(3, after=(2, 1)), kernel(3, "a", 0)]], 3, 2)


def record(seeds: Sequence[int], peers: bool, mutant: str) -> list[Work]:
    """What this rank issues in planned steps of a model that has collectives of its own between MoE layers."""
    session, model, _ = make(ranks_per_node=1 if not peers else 2)

    def own_collective(_index: int, rows: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(rows.detach().sum().reshape(1))
        return rows

    model.before_block = own_collective
    with late_device.install("lazy", peers=peers) as device, recording(device) as log, mutated(mutant):
        for seed in seeds:
            step = Step(seed)
            plan = random_plan(
                step.rng, step.workload, step.schedule, slots=2, placement=step.plan.placement,
                ranks_per_node=session.topology.ranks_per_node,
            )  # fmt: skip
            step.apply(session, plan)
            step.run(session, model)
            model.zero_grad()
        session.close()
    return log.works


@pytest.mark.longer
@pytest.mark.parametrize(("ranks", "peers"), [(2, False), (2, True), (4, True)])
def test_transfers_and_collectives_of_planned_steps_end(ranks: int, peers: bool) -> None:
    works_R = on_ranks(record, (range(2), peers, ""), ranks=ranks)
    assert all(sum(bool(work.peers) for work in works) > 50 for works in works_R)
    for connections in CONNECTIONS:
        for resident in RESIDENT:
            assert not blocked(works_R, connections, resident), (connections, resident)


@pytest.mark.long
def test_another_order_of_issue_blocks() -> None:
    works_R = on_ranks(record, (range(1), False, "fetch after exchange"), ranks=2)
    assert all(blocked(works_R, connections, 1) for connections in CONNECTIONS)
