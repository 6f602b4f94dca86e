"""FasterMoE: the hottest experts are broadcast to every rank if a cost model predicts a gain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import QWEN3_30B, ModelSpec
from trimtab.planner import StepPlan
from trimtab.policies.planning_time import ULTRAEP_SIZES, PlanningTime
from trimtab.policies.policy import Traits, View


@dataclass(frozen=True)
class FasterMoe:
    """Expert shadowing of FasterMoE (He et al., PPoPP 2022; code at thu-pacman/FasterMoE and laekov/fastmoe).

    Published: before each layer's dispatch the counts are gathered and experts are taken from the hottest down. Each
    is broadcast to all ranks (a *shadow*, with which a rank computes its own tokens of that expert), as long as that
    lowers the predicted time: three times the forward work of the busiest expert, four times its token transfer, and
    one transfer of the weights of every shadow. Gradients of shadows are reduced to the home.

    Unpublished details and our choices: their model has one expert per rank, so the busiest expert is the busiest rank.
    Ours counts the rows that the busiest rank computes, shadowed ones included, and those that the busiest rank
    receives, and charges a shadow two transfers, broadcast and gradient reduction. Theirs stops at the first expert
    without a gain; ours uses the best number of shadows, since the next expert may be on another rank. A rank without
    tokens for a shadow gets no copy in our plan, which underestimates the bytes moved. FasterMoE's pipelined exchange
    and gate are not included. No planning time is published; UltraEP's is charged.

    On equal terms, no more experts are shadowed than a rank has slots.

    Attributes:
        model: Qwen3-30B-A3B in bf16 by default.
        flops: multiply-adds count twice; half of the H100 rate on large matrices, because experts are small.
        node_bytes_per_s, network_bytes_per_s: to and from each rank, with one node and with several; DeepEP's dispatch
            rates over NVLink and over 400 Gb/s links.
    """

    traits: ClassVar[Traits] = Traits(
        known_at="layer", planning=PlanningTime.published(*ULTRAEP_SIZES, source="UltraEP's"), copies="unbounded"
    )
    model: ModelSpec = QWEN3_30B
    flops: float = 400e12
    node_bytes_per_s: float = 150e9
    network_bytes_per_s: float = 50e9

    def plan(self, view: View) -> StepPlan:
        limit = view.cluster.slots_per_rank if view.equal_terms else view.num_experts
        one_node = view.cluster.ranks == view.cluster.ranks_per_node
        bytes_per_s = self.node_bytes_per_s if one_node else self.network_bytes_per_s
        most = 0

        def plan_one(_: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
            nonlocal most
            shadows = self.shadows(counts_RE, home_E, limit, bytes_per_s)
            most = max(most, len(shadows))
            row, ranks_P = np.nonzero(counts_RE[:, shadows].T)
            away = ranks_P != home_E[shadows[row]]
            experts_P, ranks_P = shadows[row[away]], ranks_P[away]
            quotas_PR = np.zeros((len(experts_P), len(counts_RE)), np.int64)
            quotas_PR[np.arange(len(experts_P)), ranks_P] = counts_RE[ranks_P, experts_P]
            return np.stack([experts_P, ranks_P], axis=1), quotas_PR

        plan = view.plan_instances(plan_one, placement=view.placement, slots=limit)
        return plan if view.equal_terms else replace(plan, slots_per_rank=most)

    def shadows(self, counts_RE: Array, home_E: Array, limit: int, bytes_per_s: float) -> Array:
        """Experts to broadcast, at most `limit`, hottest first, from `counts_RE [R, E]` and `home_E [E]`."""
        hottest = np.argsort(-counts_RE.sum(axis=0), kind="stable")[:limit]
        computed_KR, received_KR = rows_by_shadows(counts_RE, home_E, hottest)
        row_s = 2 * self.model.expert_parameters / self.flops
        send_s = self.model.hidden_size * self.model.weight_bytes / bytes_per_s
        shadow_s = 2 * self.model.expert_bytes / bytes_per_s
        time_K = 3 * row_s * computed_KR.max(axis=1) + 4 * send_s * received_KR.max(axis=1)
        return hottest[: np.argmin(time_K + shadow_s * np.arange(len(time_K)))]


def rows_by_shadows(counts_RE: Array, home_E: Array, hottest_K: Array) -> tuple[Array, Array]:
    """Rows that each rank computes and receives, both `[K + 1, R]` int64, with the first k experts shadowed."""
    at_home_RE = home_E == np.arange(len(counts_RE))[:, None]
    counts_E = counts_RE.sum(axis=0)
    computed_R = (at_home_RE * counts_E).sum(axis=1)
    received_R = computed_R - (at_home_RE * counts_RE).sum(axis=1)
    own_KR = counts_RE[:, hottest_K].T
    goes_KR = at_home_RE[:, hottest_K].T * counts_E[hottest_K, None]
    own_at_home_KR = at_home_RE[:, hottest_K].T * own_KR
    none_R = np.zeros((1, len(counts_RE)), np.int64)
    computed_KR = computed_R + np.cumsum(np.concatenate([none_R, own_KR - goes_KR]), axis=0)
    received_KR = received_R - np.cumsum(np.concatenate([none_R, goes_KR - own_at_home_KR]), axis=0)
    return computed_KR, received_KR
