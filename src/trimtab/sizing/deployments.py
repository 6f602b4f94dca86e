"""`find_deployments`: the best numbers of ranks, tensor parallelism, micro-batches and batch of a rollout.

Micro-batches go back and forth between attention and expert ranks. In a layer a micro-batch needs T_a + T_e + 2 T_c
seconds, and a side is busy for m times its own; the longer of both is the period of a layer. With at least
(T_a + T_e + 2 T_c) / max(T_a, T_e) micro-batches the busier side never waits; for T_a = T_e that is MegaScale-Infer's
2 (1 + T_c / T_a) (arXiv 2504.02263). A direction of the links is a stage, too: it carries one micro-batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from trimtab.array_type import Array
from trimtab.sizing.decode_costs import DecodeCosts, exchange_s
from trimtab.sizing.expert_times import ExpertTimes, Table

# Sequences of a rank in a micro-batch.
SEQUENCES = tuple(sorted({value << power for power in range(11) for value in (2, 3)} | {1}))
TENSOR_RANKS = (1, 2, 4, 8)
# Colocated ranks overlap the exchanges of one micro-batch with the compute of another (DeepEP's two-batch overlap).
COLOCATED_MICRO_BATCHES, MICRO_BATCHES = (1, 2), (2, 3, 4)


@dataclass(frozen=True)
class Deployment:
    """A deployment, and what it does in the time of one token of all its sequences.

    Attributes:
        cluster, expert_cluster: kinds of nodes of attention and of experts.
        attention_ranks, expert_ranks: all ranks, twice, if they are colocated.
        colocated: whether every rank has attention and experts.
        tp: ranks that share the attention of a sequence.
        micro_batches: m.
        batch: sequences of a rank, in all micro-batches.
        copies: of hot experts, in each layer of an expert rank.
        attention_s, expert_s, exchange_s: T_a, T_e of the busiest rank and T_c, of a micro-batch in a layer, mean of
            the layers.
        outer_s: dense layers and output head, of a micro-batch.
        token_s: time per output token.
        attention_bytes, expert_bytes: weights and KV cache of a rank of each kind; colocated: the same sum twice.
        max_over_mean: rows of the busiest expert rank over the mean.
        money_per_s: of all ranks; None without prices.
        moe_layers: layers with experts.
    """

    cluster: str
    expert_cluster: str
    attention_ranks: int
    expert_ranks: int
    colocated: bool
    tp: int
    micro_batches: int
    batch: int
    copies: int
    attention_s: float
    expert_s: float
    exchange_s: float
    outer_s: float
    token_s: float
    attention_bytes: float
    expert_bytes: float
    max_over_mean: float
    money_per_s: float | None
    moe_layers: int

    @property
    def gpus(self) -> int:
        """All ranks."""
        return self.attention_ranks + (0 if self.colocated else self.expert_ranks)

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.batch * self.attention_ranks / self.token_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.gpus

    @property
    def tokens_per_money(self) -> float | None:
        """Tokens for one unit of money; None without prices."""
        return self.tokens_per_s / self.money_per_s if self.money_per_s else None

    @property
    def worth(self) -> float:
        """What the search maximises: tokens per money if there are prices, else per second and GPU."""
        return self.tokens_per_money or self.tokens_per_s_per_gpu

    @property
    def least_micro_batches(self) -> float:
        """Micro-batches from which the busier side never waits."""
        one = self.attention_s + self.expert_s + 2 * self.exchange_s
        return one / max(self.attention_s, self.expert_s)

    @property
    def attention_idle(self) -> float:
        """Part of the time for which attention ranks wait."""
        busy = self.micro_batches * (self.moe_layers * self.attention_s + self.outer_s)
        busy += self.colocated * self.micro_batches * self.moe_layers * self.expert_s
        return max(0.0, 1 - busy / self.token_s)

    @property
    def expert_idle(self) -> float:
        """Part of the time for which the busiest expert rank of each layer waits."""
        busy = self.micro_batches * self.moe_layers * self.expert_s
        return self.attention_idle if self.colocated else max(0.0, 1 - busy / self.token_s)


def token_seconds(attention_s: Array, expert_L: Array, exchange_s: Array, outer_s: Array, micro_batches: int) -> Array:
    """Seconds `[...]` of a token in layers with expert times `[..., L]`, on separate ranks.

    Dense layers and output head come before the first layer's attention. Exact where layers are alike and nothing is
    outside of them; within 2% with 32 or more layers and up to 1.5 `attention_s` outside. Where experts of layers
    differ by up to 25%, on average 0.2% and at most some percent too long, as micro-batches use slack of other layers.
    """

    def layer(attention_s: Array, expert_s: Array, exchange_s: Array) -> Array:
        slowest = np.maximum(np.maximum(attention_s, expert_s), exchange_s)
        return np.maximum(micro_batches * slowest, attention_s + expert_s + 2 * exchange_s)

    first = layer(attention_s + outer_s, expert_L[..., 0], exchange_s)
    return first + layer(attention_s[..., None], expert_L[..., 1:], exchange_s[..., None]).sum(axis=-1)


def colocated_seconds(attention_s: Array, expert_L: Array, exchange_s: Array, outer_s: Array, batches: int) -> Array:
    """As `token_seconds`, where every rank computes both, attention of all micro-batches before experts of the first.
    Exact for one or two micro-batches and layers that are alike."""

    def half(compute_s: Array, exchange_s: Array) -> Array:
        """Until the first micro-batch can go on: its exchange has ended, and the others are computed."""
        return np.maximum(batches * compute_s, compute_s + exchange_s)

    attention = half(attention_s + outer_s, exchange_s) + (expert_L.shape[-1] - 1) * half(attention_s, exchange_s)
    return attention + half(expert_L, exchange_s[..., None]).sum(axis=-1)


@dataclass(frozen=True)
class Search:
    """What deployments are searched among.

    Attributes:
        times: of the busiest expert rank, from the trace.
        attention, experts: costs on the ranks of each kind; the same if there is one kind.
        most_gpus: of a deployment.
        most_token_s: limit of the time per output token.
        slots: copies of hot experts in each layer of a rank, where there are copies.
        micro_batches: numbers of micro-batches on separate ranks.
        prices: of an hour of a rank of each kind.
    """

    times: ExpertTimes
    attention: DecodeCosts
    experts: DecodeCosts
    most_gpus: int
    most_token_s: float
    slots: int
    micro_batches: tuple[int, ...]
    prices: tuple[float, float] | None

    @property
    def kinds(self) -> tuple[Search, ...]:
        """Searches of colocated ranks, one for each kind."""
        if self.attention == self.experts:
            return (self,)
        return tuple(
            replace(self, attention=costs, experts=costs, prices=self.prices and (self.prices[kind], self.prices[kind]))
            for kind, costs in enumerate((self.attention, self.experts))
        )

    def find(self, *, colocated: bool, copies: bool) -> tuple[Deployment | None, Deployment | None]:
        """The best deployment within the limit, and the fastest that fits memory; None without one."""
        best, fastest = None, None
        for found in self.sizes(colocated=colocated, copies=self.slots if copies else 0):
            if fastest is None or found.token_s < fastest.token_s:
                fastest = found
            if found.token_s <= self.most_token_s and (best is None or found.worth > best.worth):
                best = found
        return best, fastest

    def sizes(self, *, colocated: bool, copies: int) -> Iterator[Deployment]:
        """The best within the limit and the fastest of every number of ranks, tensor parallelism and micro-batches."""
        model, per_node = self.attention.model, self.attention.cluster.ranks_per_node
        widths = [tp for tp in TENSOR_RANKS if tp <= per_node and not (model.attention_heads or tp) % tp]
        for ranks in range(1, self.most_gpus + 1):
            slots = model.num_experts // ranks + copies
            expert_bytes = self.experts.expert_bytes(slots)
            # No rank has two copies of an expert.
            if model.num_experts % ranks or slots > model.num_experts or expert_bytes > self.experts.usable_bytes:
                continue
            slots_LP = self.times.slots_LP(ranks, copies, self.experts.cluster.ranks_per_node)
            table = self.times.table(self.experts.expert_costs(), slots_LP, ranks)
            # afd-plugin's connector wants a multiple of the expert ranks.
            for senders in [ranks] if colocated else range(ranks, self.most_gpus - ranks + 1, ranks):
                for tp in widths:
                    for number in COLOCATED_MICRO_BATCHES if colocated else self.micro_batches:
                        if senders % tp == 0:
                            yield from self._batches(senders, ranks, tp, number, copies, table, colocated)

    def _batches(
        self, senders: int, ranks: int, tp: int, micro_batches: int, copies: int, table: Table, colocated: bool
    ) -> Iterator[Deployment]:
        """The best within the limit and the fastest of all batches that fit."""
        model, sequences_B = self.attention.model, np.array(SEQUENCES, float)
        expert_bytes = self.experts.expert_bytes(model.num_experts // ranks + copies)
        bytes_B = np.asarray(self.attention.attention_bytes(tp * micro_batches * sequences_B, tp))
        tokens_B = senders * sequences_B
        fits_B = bytes_B + colocated * expert_bytes <= self.attention.usable_bytes
        fits_B &= tokens_B <= self.times.tokens_P[-1]
        sequences_B, bytes_B, tokens_B = sequences_B[fits_B], bytes_B[fits_B], tokens_B[fits_B]
        if not len(sequences_B):
            return
        seconds_PL, uneven_P = table
        expert_BL = np.stack([np.interp(tokens_B, self.times.tokens_P, row_P) for row_P in seconds_PL.T], axis=1)
        attention_B = np.asarray(self.attention.attention_s(tp * sequences_B, tp))
        outer_B = np.asarray(self.attention.outer_s(tp * sequences_B, tp))
        # A token of a tensor-parallel group is sent by one of its ranks.
        exchange_B = exchange_s(self.attention, self.experts, tokens_B, senders, 0 if colocated else ranks)
        seconds = colocated_seconds if colocated else token_seconds
        layers_BL = np.repeat(expert_BL, -(-model.moe_layers // expert_BL.shape[1]), axis=1)[:, : model.moe_layers]
        token_B = seconds(attention_B, layers_BL, exchange_B, outer_B, micro_batches)
        per_s_B = np.where(token_B <= self.most_token_s, sequences_B / token_B, 0)
        for place in {int(np.argmax(per_s_B)), int(np.argmin(token_B))}:
            prices = self.prices and (self.prices[0], 0.0 if colocated else self.prices[1])
            yield Deployment(
                cluster=self.attention.cluster.name,
                expert_cluster=self.experts.cluster.name,
                attention_ranks=senders,
                expert_ranks=ranks,
                colocated=colocated,
                tp=tp,
                micro_batches=micro_batches,
                batch=int(sequences_B[place]) * micro_batches,
                copies=copies,
                attention_s=float(attention_B[place]),
                expert_s=float(layers_BL[place].mean()),
                exchange_s=float(exchange_B[place]),
                outer_s=float(outer_B[place]),
                token_s=float(token_B[place]),
                attention_bytes=float(bytes_B[place]) + colocated * expert_bytes,
                expert_bytes=float(bytes_B[place] * colocated) + expert_bytes,
                max_over_mean=float(np.interp(tokens_B[place], self.times.tokens_P, uneven_P)),
                money_per_s=prices and (senders * prices[0] + ranks * prices[1]) / 3600,
                moe_layers=model.moe_layers,
            )
