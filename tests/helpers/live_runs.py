"""Training on live routing, compared with one process that holds the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers.equality import relative_error
from helpers.moe_model import ALL_LISTS, Shape, TinyMoE, matches
from trimtab.array_type import Array
from trimtab.planner.replicas.kernel_values import Limits
from trimtab.runtime import Session
from trimtab.runtime.live import balancer
from trimtab.runtime.live.balancer import choose_quotas
from trimtab.runtime.rows.physical_experts import InstanceReplicas


@dataclass(frozen=True)
class LiveCase:
    """One random comparison.

    Attributes:
        seed: of everything random.
        policy: see `Session`.
        run_block: see `helpers.equality.CHECKPOINTING`.
        at_once: all forwards of a step run before the first backward.
        random: replace the choices of `quota` and `feplb` by random ones.
        padded: feed rows that belong to no token.
        by_messages: replicas inside a node are sent as messages.
        listed: expert tensors are lists of Parameters.
        twice: each forward has two backwards.
    """

    seed: int
    policy: str
    run_block: str = "plain"
    at_once: bool = False
    random: bool = False
    padded: bool = False
    by_messages: bool = False
    listed: bool = False
    twice: bool = False


STEPS = 3


def compare_live(cases: Iterable[LiveCase]) -> int:
    """Assert that losses, gradients and weights are those of the single process. Returns the number of replicas."""
    torch.set_num_threads(1)
    return sum(_compare(case) for case in cases)


def _compare(case: LiveCase) -> int:
    rng, own_rng = np.random.default_rng(case.seed), np.random.default_rng((case.seed, dist.get_rank()))
    torch.manual_seed(case.seed)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    experts = ranks * int(rng.integers(1, 5))
    shape = Shape(
        layers=int(rng.integers(1, 5)), experts=experts, top_k=int(rng.integers(1, min(4, experts) + 1)), hidden=8,
        width=6, lists=ALL_LISTS if case.listed else (),
    )  # fmt: skip
    per_node = int(rng.choice([size for size in range(1, ranks + 1) if ranks % size == 0]))
    slots: dict[str, Any] = {"slots_per_rank": int(rng.integers(1, 4)), "ring_layers": int(rng.integers(2, 5))}
    session = Session(
        num_experts=experts, ranks_per_node=per_node, mode="live", policy=case.policy,  # type: ignore[arg-type]
        paths="message" if case.by_messages else "both", **slots,
    )  # fmt: skip
    reference, model = TinyMoE(shape, torch.float64), TinyMoE(shape, torch.float64, case.run_block)
    for block in reference.moe_blocks():
        # A skewed router, so that there is something to balance.
        block.router.weight.data *= 4
    model.load_state_dict(reference.state_dict())
    model.share(session)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=0.1) for m in (reference, model)]
    session.register_optimizers(optimizers[1])
    replicas, timed_s = 0, 0.0
    with pytest.MonkeyPatch.context() as patch:
        # Few tokens are enough for a replica.
        patch.setattr(balancer, "choose_quotas", quotas_of_few)
        if case.random:
            patch.setattr(balancer, "choose_quotas", random_quotas)
            patch.setattr(balancer, "choose_moves", random_moves)
        for _ in range(STEPS):
            sizes_MR = rng.integers(0, 30, (int(rng.integers(1, 4)), ranks)) + 1
            ends = np.cumsum(sizes_MR.reshape(-1))
            tokens = torch.from_numpy(rng.integers(0, shape.vocab, ends[-1]))
            labels = torch.from_numpy(rng.integers(0, shape.vocab, ends[-1]))
            expected = reference(tokens)
            expected_loss = F.cross_entropy(expected, labels, reduction="sum") / len(tokens)
            expected_loss.backward()
            loss, parts = torch.zeros((), dtype=torch.float64), []
            for index in range(len(sizes_MR)):
                end = int(ends[index * ranks + rank])
                rows = torch.arange(end - int(sizes_MR[index, rank]), end)
                batch, positions = tokens[rows], None
                if case.padded:
                    positions = torch.from_numpy(np.sort(own_rng.permutation(len(rows) + 3)[: len(rows)]))
                    batch = torch.zeros(len(rows) + 3, dtype=torch.int64).index_copy(0, positions, batch)
                with torch.no_grad(), session.live_micro_step(positions=positions):
                    logits = model(batch)
                    chosen = logits if positions is None else logits[positions]
                    assert relative_error(chosen, expected[rows]) < 1e-12, (case, "logits")
                with session.live_micro_step(positions=positions):
                    logits = model(batch)
                    chosen = logits if positions is None else logits[positions]
                    part = F.cross_entropy(chosen, labels[rows], reduction="sum") / len(tokens)
                    loss += part.detach()
                    if not case.at_once:
                        _backward(part, case.twice)
                parts.append(part)
            for part in parts if case.at_once else ():
                _backward(part, case.twice)
            session.finish_gradients(model.replicated())
            dist.all_reduce(loss)
            assert relative_error(loss, expected_loss.detach()) < 1e-12, (case, "loss")
            for name, actual, wanted, mine_of in matches(model, reference):
                assert actual.grad is not None
                assert wanted.grad is not None
                assert relative_error(actual.grad, wanted.grad[mine_of]) < 1e-12, (case, name, "gradient")
            metrics = session.take_metrics()
            replicas += int(metrics["live/replicas"])
            timed_s += metrics["live/homes_s"]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    session.close()
    timed = torch.tensor(timed_s)
    dist.all_reduce(timed)
    assert bool(timed > 0) == (replicas > 0), (case, "times of home experts")
    return replicas


def _backward(loss: torch.Tensor, twice: bool) -> None:
    if twice:
        (loss / 4).backward(retain_graph=True)
        loss = loss * 3 / 4
    loss.backward()


def quotas_of_few(counts_RE: Array, home_E: Array, limits: Limits) -> InstanceReplicas:
    return choose_quotas(counts_RE, home_E, limits._replace(smallest_share=1))


def random_quotas(counts_RE: Array, home_E: Array, limits: Limits) -> InstanceReplicas:
    """Replicas anywhere but at home, with random parts of all ranks' rows, perhaps none."""
    rng = np.random.default_rng(counts_RE.reshape(-1) % 1000)
    ranks, left_RE, taken, quotas = len(counts_RE), counts_RE.copy(), [], []
    for rank in rng.permutation(ranks).tolist():
        others = np.flatnonzero(home_E != rank)
        for expert in rng.permutation(others)[: int(rng.integers(0, limits.slots + 1))].tolist():
            quota_R = rng.integers(0, left_RE[:, expert] + 1)
            left_RE[:, expert] -= quota_R
            taken.append((expert, rank))
            quotas.append(quota_R)
    experts, at = np.array(taken, np.int64).reshape(-1, 2).T
    return InstanceReplicas.chosen(experts, at, np.array(quotas, np.int64).reshape(-1, ranks))


def random_moves(counts_RE: Array, home_E: Array, rows_E: Array, dynamic_E: Array, limits: Limits) -> InstanceReplicas:
    """Whole experts to any other ranks, each to one."""
    rng = np.random.default_rng(counts_RE.reshape(-1) % 1000)
    ranks = len(counts_RE)
    free = dict.fromkeys(range(ranks), limits.slots)
    moves = []
    for expert in rng.permutation(len(home_E))[: int(rng.integers(0, len(home_E) + 1))].tolist():
        rank = int(rng.integers(0, ranks))
        if rank != home_E[expert] and free[rank]:
            free[rank] -= 1
            moves.append((rank, int(home_E[expert]), int(rows_E[expert]), expert))
    experts = np.array([move[3] for move in sorted(moves)], np.int64)
    at = np.array([move[0] for move in sorted(moves)], np.int64)
    return InstanceReplicas.chosen(experts, at, counts_RE.T[experts].astype(np.int64))
