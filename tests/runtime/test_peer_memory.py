"""Replicas copied from another rank's memory, as on CUDA, but in host memory: on real ranks and random plans."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers.equality import CHECKPOINTING, Case, CountingPeers, compare_cases
from helpers.examples import examples
from helpers.moe_model import Shape, TinyMoE
from helpers.random_plans import random_placement, random_plan, random_schedule, random_trace
from helpers.rank_pool import on_ranks
from trimtab.planner import Workload
from trimtab.runtime import Session
from trimtab.runtime.transfer.peer_memory import PeerMemory

SHAPE = Shape(layers=3, experts=8, top_k=2, hidden=8, width=6)


def compare_and_count(cases: list[Case]) -> None:
    compare_cases(cases)
    assert CountingPeers.pulled > len(cases)


@pytest.mark.longer
@pytest.mark.parametrize("ranks", [2, 4])
def test_copied_replicas_equal_the_single_process(ranks: int) -> None:
    """In nodes of random sizes; replicas from other nodes are sent as messages."""
    cases = [
        Case(seed, torch.float64, None, run_block, steps=3, padded=False, one_sided=True, listed=seed % 2 == 1)
        for seed, (run_block, _) in enumerate(itertools.product(CHECKPOINTING, range(examples(short=1, long=3))))
    ]
    on_ranks(compare_and_count, (cases,), ranks=ranks)


def train(*, one_sided: bool) -> tuple[Session, list[torch.Tensor]]:
    """Results and weights of this rank after two steps in mixed precision on random plans."""
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    session = Session(num_experts=SHAPE.experts, ranks_per_node=2, slots_per_rank=2)
    model = TinyMoE(SHAPE, torch.float32)
    for block in model.moe_blocks():
        block.compute_dtype = torch.bfloat16
    model.share(session)
    if one_sided:
        session.transfers.ring.peers = PeerMemory.in_host_memory(session.topology, session.homes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.register_optimizers(optimizer)
    kept: list[torch.Tensor] = []
    for _ in range(2):
        trace = random_trace(rng, num_sequences=12, max_length=20, num_layers=3, num_experts=8, top_k=2)
        schedule = random_schedule(rng, 12, num_ranks=session.num_ranks, num_micro_steps=2)
        placement = random_placement(rng, 3, 8, session.num_ranks)
        workload = Workload.from_trace(trace, schedule)
        plan = random_plan(rng, workload, schedule, slots=2, placement=placement, ranks_per_node=2)
        mine = trace.select(schedule.sequences_of(session.rank))
        session.apply_step_plan(plan, mine)
        tokens = torch.from_numpy(rng.integers(0, SHAPE.vocab, 400))
        for index in range(2):
            rows = int(mine.sequence_lengths[schedule.of_rank(session.rank) == index].sum())
            with session.micro_step(index):
                logits = model(tokens[:rows])
                F.cross_entropy(logits, tokens[1 : rows + 1], reduction="sum").backward()
            kept.append(logits.detach())
        session.finish_gradients(model.replicated())
        optimizer.step()
        optimizer.zero_grad()
    kept += [parameter.detach() for parameter in model.parameters()]
    return session, kept


def compare_ways() -> None:
    torch.set_num_threads(1)
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
    for each in (sent_session, session):
        each.close()


def test_copies_and_messages_give_the_same_results() -> None:
    on_ranks(compare_ways, (), ranks=4)
