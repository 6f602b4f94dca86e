"""A hand-written MoE layer in a Trimtab session, and its training loop, without transformers.

`python examples/own_moe_layer.py` starts two local ranks; under torchrun the process is one rank. The model learns to
predict the successor of each token, in sequences of different lengths. Trimtab also assigns sequences to micro-steps
and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trimtab import RoutingTrace
from trimtab.launch import launch
from trimtab.runtime import ExpertWeight, RowGroups, Session, grouped_linear

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH, VOCAB = 2, 8, 2, 32, 64, 50
SEQUENCES = 12  # of a rank in a step
TOKEN_BUDGET = 1024  # most tokens of a rank in a micro-step


def squared_relu_experts(weights: Sequence[ExpertWeight], rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """Outputs `[N, HIDDEN]` of rows that are grouped by expert. Any function of this form can be used."""
    up, down = weights
    return grouped_linear(F.relu(grouped_linear(rows, up, groups)).square(), down, groups)


class MoELayer(nn.Module):
    """A router, and experts that the session runs."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        up, down = torch.randn(EXPERTS, WIDTH, HIDDEN), torch.randn(EXPERTS, HIDDEN, WIDTH)  # equal on every rank
        home = torch.from_numpy(session.home_experts)
        self.up, self.down = nn.Parameter(up[home] * 0.1), nn.Parameter(down[home] * 0.1)  # of this rank
        self.experts = session.add_layer([self.up, self.down], squared_relu_experts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.router(hidden)
        self.ids = self.experts.route(logits.topk(TOP_K).indices)  # in a planned micro-step: the recorded ids
        weights = logits.softmax(-1).gather(1, self.ids)
        return hidden + self.experts(hidden, self.ids, weights)


def train(steps: int = 4) -> None:
    """Train on every rank."""
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    session = Session(num_experts=EXPERTS)
    layers = [MoELayer(session) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *layers, nn.Linear(HIDDEN, VOCAB))
    replicated = session.replicated_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.register_optimizers(optimizer)

    draw = np.random.default_rng(rank)
    for step in range(steps):
        # Rollout: outside a micro-step, the layers follow their routers. Ids are [tokens, layers, top_k].
        sequences = []
        for length in draw.integers(100, 400, SEQUENCES):
            tokens = torch.from_numpy(draw.zipf(1.5, length) % VOCAB)
            with torch.no_grad():
                model(tokens)
            sequences.append((tokens, torch.stack([layer.ids for layer in layers], dim=1).numpy()))

        # Plan, and select the sequences that this rank trains on.
        planned = session.plan_sequences(trace_of(sequences), token_budget=TOKEN_BUDGET)
        schedule = planned.schedule
        everyones: list[list[tuple[torch.Tensor, np.ndarray]]] = [[] for _ in range(ranks)]
        dist.all_gather_object(everyones, sequences)
        in_rank_order = [sequence for part in everyones for sequence in part]
        mine = [in_rank_order[index] for index in schedule.sequences_of(rank)]
        report = session.apply_plan(planned, trace_of(mine))

        # Train. The loss is a sum over tokens, divided by the tokens of all ranks and micro-steps.
        constant = sum(len(tokens) for tokens, _ in in_rank_order)
        total = torch.zeros(())
        for index in range(schedule.num_micro_steps):
            chosen = [mine[s][0] for s in np.flatnonzero(schedule.of_rank(rank) == index)]
            tokens = torch.cat([torch.empty(0, dtype=torch.int64), *chosen])  # a rank may have none
            with session.micro_step(index):
                loss = F.cross_entropy(model(tokens), (tokens + 1) % VOCAB, reduction="sum") / constant
                loss.backward()
            total += loss.detach()
        session.finish_gradients(replicated)  # sends replica gradients home, sums the others over ranks
        session.clip_gradients(replicated, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

        dist.all_reduce(total)
        if rank == 0:
            print(
                f"step {step}: loss {total:.3f}, {report.replicas} replicas, "
                f"max_vio {report.max_vio_before:.3f} before, {report.max_vio_after:.3f} planned",
                flush=True,
            )


def trace_of(sequences: list[tuple[torch.Tensor, np.ndarray]]) -> RoutingTrace:
    """Routing of sequences."""
    return RoutingTrace.from_sequences([ids for _, ids in sequences], num_experts=EXPERTS, shape=(LAYERS, TOP_K))


if __name__ == "__main__":
    launch(train, (), ranks=2)
