"""Replicas copied from another rank's memory, as on CUDA, but in host memory: on real ranks and random plans."""

from __future__ import annotations

import torch

from helpers.planned_steps import Step, make
from helpers.random_plans import random_plan
from helpers.rank_tests import runs_on_ranks
from trimtab.runtime import Session
from trimtab.runtime.transfer.peer_memory import PeerMemory


def train(*, one_sided: bool) -> tuple[Session, list[torch.Tensor]]:
    """Results and weights of this rank after two steps in mixed precision on random plans."""
    session, model, _ = make(compute_dtype=torch.bfloat16, ranks_per_node=2)
    if one_sided:
        session.transfers.ring.peers = PeerMemory.in_host_memory(session.topology, session.homes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.register_optimizers(optimizer)
    results: list[torch.Tensor] = []
    for seed in range(2):
        step = Step(seed)
        placement = step.plan.placement
        plan = random_plan(step.rng, step.workload, step.schedule, slots=2, placement=placement, ranks_per_node=2)
        step.apply(session, plan)
        results.append(step.run(session, model))
        optimizer.step()
        optimizer.zero_grad()
    return session, results + [parameter.detach() for parameter in model.parameters()]


@runs_on_ranks(4)
def test_copies_and_messages_give_the_same_results() -> None:
    sent_session, sent = train(one_sided=False)
    session, pulled = train(one_sided=True)
    for one, other in zip(sent, pulled, strict=True):
        assert torch.equal(one, other)
    peers = session.transfers.ring.peers
    assert peers is not None
    for layer in session.layers:
        # Staging memory is the memory that other ranks read.
        own = peers.row(layer.index, session.rank, 1)
        assert [t.data_ptr() for t in own] == [t[1].data_ptr() for t in layer.homes.sources]
    neighbour = session.rank ^ 1
    shown = [torch.stack([peers.row(0, rank, row)[0] for row in range(2)]) for rank in (session.rank, neighbour)]
    theirs = [torch.empty_like(shown[0]) for _ in range(4)]
    torch.distributed.all_gather(theirs, shown[0])
    assert torch.equal(theirs[neighbour], shown[1])
    # The sender or the copying rank counts the bytes.
    totals = torch.tensor([s.take_metrics()["transfer/peer_bytes"] for s in (sent_session, session)])
    torch.distributed.all_reduce(totals)
    assert totals[0] == totals[1] > 0
