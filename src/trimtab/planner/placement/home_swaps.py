"""Level two, placement: experts are swapped between home ranks.

Homes are fixed for a step; replicas can change with every micro-step, and are cheap inside a node. Homes are therefore
chosen to balance *nodes* in every micro-step, and then ranks as well as possible. Starting from the homes of the last
step, two experts of different ranks are swapped while this reduces

    sum over micro-steps of (sum over ranks of load^2 + sum over nodes of load^2),

which is smallest for even loads. With Gram matrices of the counts a swap is evaluated in constant time. (Our own;
ReLibra, arXiv 2605.08639, reorders experts across nodes by swaps and annealing.)

All sums are whole numbers that a float64 holds exactly: with rounding errors, swaps could go round in circles for ever.
Very large counts are therefore divided by a power of two first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel

# Of the squared tokens of all micro-steps. Every sum of a search is less than 32 times as much, and below 2^53.
MOST_SQUARES = 2.0**48


class LoadProducts(NamedTuple):
    """Sums over micro-steps of an expert's tokens times another load; whole numbers in float64.

    Attributes:
        expert_EE: `[E, E]`, times the tokens of each expert.
        rank_ER: `[E, R]`, times the load of each rank.
        node_EN: `[E, N]`, times the load of each node.
    """

    expert_EE: Array
    rank_ER: Array
    node_EN: Array


def place_experts(
    counts_ME: Array,
    home_E: Array,
    num_ranks: int,
    ranks_per_node: int,
    *,
    move_penalty: float = 0.0,
    in_nodes: bool = False,
) -> Array:
    """Returns improved homes `[E]` int16 for one layer. Every rank keeps its number of experts.

    Args:
        counts_ME: `[M, E]` integer tokens by micro-step and expert. Micro-steps of several expert-parallel groups,
            which share their homes, follow one another.
        home_E: `[E]` integer homes to start from.
        move_penalty: the fraction of the imbalance by which moving one expert away from `home_E` must reduce it.
        in_nodes: whether every expert stays in its node.
    """
    counts = _limited(counts_ME.astype(np.float64))
    at_home_ER = np.zeros((counts.shape[1], num_ranks))
    at_home_ER[np.arange(counts.shape[1]), home_E] = 1
    loads_MR = counts @ at_home_ER
    loads_MN = loads_MR.reshape(len(counts), -1, ranks_per_node).sum(axis=-1)
    even = _squares(counts)
    imbalance = (loads_MR**2).sum() - even / num_ranks + (loads_MN**2).sum() - even * ranks_per_node / num_ranks
    home = home_E.astype(np.int64)
    products = LoadProducts(counts.T @ counts, counts.T @ loads_MR, counts.T @ loads_MN)
    price = float(np.rint(move_penalty * imbalance))
    _swap_homes(products, home, home.copy(), ranks_per_node, price, bool(in_nodes))
    return home.astype(np.int16)


def _squares(counts_ME: Array) -> float:
    return float((counts_ME.sum(axis=1) ** 2).sum())


def _limited(counts_ME: Array) -> Array:
    """Whole counts in about the same proportions, whose squares do not exceed `MOST_SQUARES`."""
    while _squares(counts_ME) > MOST_SQUARES:
        counts_ME = np.floor(counts_ME / 2)
    return counts_ME


@kernel
def _swap_homes(products, home_E, old_home_E, ranks_per_node, price, in_nodes):  # type: ignore[no-untyped-def]
    """Swap experts while that reduces the objective.

    Args:
        products: `LoadProducts`; updated.
        home_E: `[E]` int64; changed.
        old_home_E: `[E]` int64.
        price: cost of each expert that is not at its old home.
        in_nodes: whether only ranks of the same node swap.
    """
    products_EE, products_ER, products_EN = products.expert_EE, products.rank_ER, products.node_EN
    num_experts = len(home_E)
    improved = True
    while improved:
        improved = False
        for e in range(num_experts):
            a = home_E[e]
            best, partner = 0.0, -1
            for f in range(num_experts):
                b = home_E[f]
                if b == a or (in_nodes and a // ranks_per_node != b // ranks_per_node):
                    continue
                # Twice the square of the moved load, in both directions.
                square = 2 * (products_EE[e, e] + products_EE[f, f] - 2 * products_EE[e, f])
                change = square + 2 * (products_ER[f, a] - products_ER[e, a] - products_ER[f, b] + products_ER[e, b])
                node_a, node_b = a // ranks_per_node, b // ranks_per_node
                if node_a != node_b:
                    across = products_EN[f, node_a] - products_EN[e, node_a]
                    across -= products_EN[f, node_b] - products_EN[e, node_b]
                    change += square + 2 * across
                before = np.int64(a != old_home_E[e]) + np.int64(b != old_home_E[f])
                after = np.int64(b != old_home_E[e]) + np.int64(a != old_home_E[f])
                change += price * (after - before)
                if change < best:
                    best, partner = change, f
            if partner < 0:
                continue
            improved = True
            b = home_E[partner]
            for x in range(num_experts):
                moved = products_EE[x, partner] - products_EE[x, e]
                products_ER[x, a] += moved
                products_ER[x, b] -= moved
                if a // ranks_per_node != b // ranks_per_node:
                    products_EN[x, a // ranks_per_node] += moved
                    products_EN[x, b // ranks_per_node] -= moved
            home_E[e], home_E[partner] = b, a
