"""`order_experts`: another order of the experts of each layer, so that contiguous homes are balanced."""

from __future__ import annotations

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner.placement.home_swaps import place_experts


def order_experts(counts_MLE: Array, num_ranks: int, ranks_per_node: int, groups: int = 1) -> Array:
    """Orders `[L, E]` int64, old ids by new ones, for the loads of past steps, by the swaps of `place_experts`.

    Args:
        counts_MLE: `[M, L, E]` integer tokens by part, for example by step.
        groups: as in `ModelSpec.expert_groups`. The experts of a group stay together; groups change places as wholes,
            and experts change places within them.

    Raises:
        InputError: if neither the ranks divide the groups, nor the groups the ranks.
    """
    if num_ranks % groups and groups % num_ranks:
        raise InputError(
            f"{num_ranks} ranks and {groups} groups of experts: one should be a multiple of the other, so that experts "
            "can change ranks within their group"
        )
    return np.stack(
        [_order_layer(counts_MLE[:, layer], num_ranks, ranks_per_node, groups) for layer in range(counts_MLE.shape[1])]
    )


def _order_layer(counts_ME: Array, num_ranks: int, ranks_per_node: int, groups: int) -> Array:
    if groups == 1:
        return _by_home(counts_ME, num_ranks, ranks_per_node)
    counts_MG = counts_ME.reshape(len(counts_ME), groups, -1).sum(axis=2)
    experts_GN, ranks_of_group = np.arange(counts_ME.shape[1]).reshape(groups, -1), num_ranks // groups
    if ranks_of_group <= 1:
        return experts_GN[_by_home(counts_MG, num_ranks, ranks_per_node)].ravel()
    if ranks_per_node % ranks_of_group == 0:
        # A group changes places as one rank would, which makes nodes even.
        experts_GN = experts_GN[_by_home(counts_MG, groups, ranks_per_node // ranks_of_group)]
    order_E = experts_GN.ravel()
    return order_E[_by_home(counts_ME[:, order_E], num_ranks, ranks_of_group, in_nodes=True)]


def _by_home(counts_MX: Array, ranks: int, ranks_per_node: int, *, in_nodes: bool = False) -> Array:
    """Experts, or groups of them, in the order of their homes."""
    home_X = np.arange(counts_MX.shape[1]) // (counts_MX.shape[1] // ranks)
    return np.argsort(place_experts(counts_MX, home_X, ranks, ranks_per_node, in_nodes=in_nodes), kind="stable")
