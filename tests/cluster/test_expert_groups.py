"""Routers that limit a token's experts to some groups: config, synthetic routing, price, plans and EPLB."""

from __future__ import annotations

from dataclasses import replace
from math import comb

import numpy as np
import pytest

from trimtab import ClusterSpec, InputError, ModelSpec, Placement, RoutingTrace, Schedule, Workload
from trimtab.array_type import Array
from trimtab.cluster import StepCosts
from trimtab.cluster.model_config import read_sizes
from trimtab.cluster.operations import OperationCosts, transfers_to
from trimtab.planner import SequenceCounts, StepPlan, plan_sequences
from trimtab.planner.plan.rank_work import rank_work
from trimtab.planner.replicas.replica_table import ReplicaTable
from trimtab.policies import make_view
from trimtab.policies.rivals.eplb import EplbOracle
from trimtab.simulator.token_replay import count_transfers
from trimtab.trace import PRESETS, synthesize_preset
from trimtab.trace.numbering import permute_experts, random_orders

DEEPSEEK = ModelSpec.named("deepseek-v3")
EXPERTS, TOP_K, GROUPS, CHOSEN = DEEPSEEK.num_experts, DEEPSEEK.top_k, 8, 4


def grouped_trace(sequences: int, *, preset: str = "qwen3-30b-math", layers: int = 2) -> RoutingTrace:
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "expert_groups": GROUPS, "groups_per_token": CHOSEN}
    return synthesize_preset(
        PRESETS[preset], num_sequences=sequences, mean_length=1024, max_length=2048, num_layers=layers, **sizes
    )


def one_sequence_each(ranks: int) -> Schedule:
    places = np.arange(ranks, dtype=np.int32)
    return Schedule(np.zeros_like(places), places, np.zeros(1, np.int32), ranks)


def costs_on(ranks: int, per_node: int, model: ModelSpec = DEEPSEEK) -> OperationCosts:
    cluster = ClusterSpec(ranks, per_node, dispatch_forwards=True)
    return OperationCosts.of(cluster, model, moe_layers=2)._replace(near_row_s=1.0, far_row_s=1.0)


def nothing_moves(workload: Workload, schedule: Schedule, home_LE: Array, per_node: int) -> StepPlan:
    cluster = ClusterSpec(schedule.num_ranks, per_node)
    none = [np.zeros((0, 2), np.int64)] * 2, [np.zeros((0, schedule.num_ranks), np.int64)] * 2
    return StepPlan.from_instances(schedule, Placement(home_LE), *none, mixed_ML=workload.mixed_ML, cluster=cluster)


def test_configs_name_the_groups() -> None:
    assert (DEEPSEEK.expert_groups, DEEPSEEK.groups_per_token) == (8, 4)
    kimi = ModelSpec.named("kimi-k2")
    assert (kimi.expert_groups, kimi.groups_per_token) == (1, 1)
    config = {"num_experts": 64, "num_experts_per_tok": 6, "hidden_size": 64, "moe_intermediate_size": 64}

    def groups_of(**keys: int) -> tuple[int, int]:
        sizes, reading = read_sizes(config | keys, "a config", {})
        assert "n_group" not in reading.ignored
        return sizes["expert_groups"], sizes["groups_per_token"]

    assert groups_of(n_group=8, topk_group=3) == (8, 3)
    assert groups_of(n_group=8, topk_group=8) == (1, 1)
    assert groups_of(n_group=16, topk_group=7) == (16, 7)
    for keys in ({"n_group": 7, "topk_group": 3}, {"n_group": 8, "topk_group": 9}, {"n_group": 32, "topk_group": 2}):
        with pytest.raises(InputError, match="a config: n_group"):
            groups_of(**keys)


@pytest.mark.parametrize("preset", ["qwen3-30b-math", "spike"])
def test_tokens_use_as_many_groups_as_they_may_at_most(preset: str) -> None:
    ids_TLK = grouped_trace(16, preset=preset).expert_ids.astype(np.int64)
    assert (np.diff(np.sort(ids_TLK, axis=2), axis=2) > 0).all(), "experts of a token differ"
    used = np.zeros((*ids_TLK.shape[:2], GROUPS), bool)
    np.put_along_axis(used, ids_TLK // (EXPERTS // GROUPS), True, axis=2)
    assert used.sum(axis=2).max() == CHOSEN


def test_drawn_experts_equal_a_plain_draw() -> None:
    """In plain numpy: one expert after another, those of other groups left out once a token has its groups."""
    experts, groups, top_k, chosen, tokens = 24, 6, 5, 2, 4000
    trace = synthesize_preset(
        replace(PRESETS["uniform"], zipf=(0.8, 0.8)), num_sequences=8, mean_length=tokens // 8, max_length=tokens,
        num_layers=1, num_experts=experts, top_k=top_k, expert_groups=groups, groups_per_token=chosen,
    )  # fmt: skip
    popularity_E = np.sort(np.arange(1, experts + 1) ** -0.8)[::-1]
    found_E = np.bincount(trace.expert_ids.ravel(), minlength=experts)
    order_E = np.argsort(-np.bincount(trace.expert_ids[:, 0, 0], minlength=experts))
    rng = np.random.default_rng(0)
    weights_E = np.empty(experts)
    weights_E[order_E] = popularity_E
    drawn_E = np.zeros(experts, np.int64)
    for _ in range(trace.num_tokens):
        open_E, used = np.ones(experts, bool), set[int]()
        for _ in range(top_k):
            expert = int(rng.choice(experts, p=(weights_E * open_E) / (weights_E * open_E).sum()))
            used.add(expert // (experts // groups))
            open_E[expert] = False
            if len(used) == chosen:
                open_E &= np.isin(np.arange(experts) // (experts // groups), list(used))
            drawn_E[expert] += 1
    assert found_E.sum() == drawn_E.sum()
    assert np.abs(found_E - drawn_E).max() < 6 * np.sqrt(drawn_E.max())


@pytest.mark.parametrize("places", [2, 4, 8])
def test_with_whole_groups_at_places_the_price_is_a_count_of_choices(places: int) -> None:
    tokens, at_place = 1000, GROUPS // places
    found_P = transfers_to(np.full(EXPERTS, tokens * TOP_K / EXPERTS), places, TOP_K, GROUPS, CHOSEN)
    none = comb(GROUPS - at_place, CHOSEN) / comb(GROUPS, CHOSEN)
    assert found_P == pytest.approx(np.full(places, tokens * (1 - none)))
    # Eight nodes: a token goes to four, not to 5.2 as if its experts were independent.
    if places == 8:
        assert found_P.sum() == pytest.approx(4 * tokens)
        assert transfers_to(np.full(EXPERTS, tokens * TOP_K / EXPERTS), 8, TOP_K).sum() > 5.2 * tokens


@pytest.mark.parametrize(
    ("ranks", "per_node", "groups", "chosen"), [(8, 4, 8, 4), (16, 4, 8, 4), (64, 8, 8, 4), (4, 2, 2, 1), (16, 4, 2, 1)]
)
def test_the_planner_prices_as_the_analysis_does(ranks: int, per_node: int, groups: int, chosen: int) -> None:
    trace, schedule = grouped_trace(ranks), one_sequence_each(ranks)
    workload = Workload.from_trace(trace, schedule)
    home_LE = Placement.contiguous(2, EXPERTS, ranks).home
    costs = costs_on(ranks, per_node)._replace(expert_groups=groups, groups_per_token=chosen)
    none = ReplicaTable.from_instances([np.zeros((0, 2), np.int64)] * 2, [np.zeros((0, ranks), np.int64)] * 2, ranks)
    work = rank_work(none, home_LE, workload.estimated_MLRE, per_node, costs)
    nodes = ranks // per_node
    to_nodes_LRN = costs.transfers(workload.estimated_MLRE[0].astype(float), nodes)
    from_node_R = np.arange(ranks) // per_node
    # A rank sends to the rank with its number on other nodes.
    sent_LR = to_nodes_LRN.sum(axis=2) - to_nodes_LRN[:, np.arange(ranks), from_node_R]
    received_LR = np.zeros((2, ranks))
    for source in range(ranks):
        for node in range(nodes):
            if node != source // per_node:
                received_LR[:, node * per_node + source % per_node] += to_nodes_LRN[:, source, node]
    assert work.far_MLR[0] == pytest.approx(np.maximum(sent_LR, received_LR))
    # That rank sends them on. Where there are few groups, these are counted for nodes alone.
    if ranks <= 2 * groups:
        rank_R = np.arange(ranks)
        relay_RR = rank_R // per_node * per_node + rank_R[:, None] % per_node
        near_LRR = costs.transfers(workload.estimated_MLRE[0].astype(float), ranks) * (relay_RR != rank_R)
        sent_LR = np.stack([np.bincount(relay_RR.ravel(), near_RR.ravel(), ranks) for near_RR in near_LRR])
        assert work.near_MLR[0] == pytest.approx(np.maximum(sent_LR, near_LRR.sum(axis=1)))


@pytest.mark.parametrize("preset", ["qwen3-30b-math", "nemotron-3-nano-text"])
@pytest.mark.parametrize(("ranks", "per_node"), [(8, 8), (16, 8), (32, 8), (64, 8), (128, 8)])
def test_the_price_is_that_of_the_tokens(ranks: int, per_node: int, preset: str) -> None:
    trace, schedule = grouped_trace(ranks, preset=preset), one_sequence_each(ranks)
    workload = Workload.from_trace(trace, schedule)
    # Homes in order of ids, and homes that mix groups on every node.
    mixed_LE = np.stack([np.random.default_rng(layer).permutation(EXPERTS) % ranks for layer in range(2)])
    in_order_LE = Placement.contiguous(2, EXPERTS, ranks).home
    for home_LE, far_error in ((in_order_LE, 0.03), (mixed_LE.astype(np.int16), 0.06)):
        plan = nothing_moves(workload, schedule, home_LE, per_node)
        work = rank_work(plan.replicas, home_LE, workload.estimated_MLRE, per_node, costs_on(ranks, per_node))
        near_MLR, far_MLR, _ = count_transfers(plan, trace)
        assert work.near_MLR.sum() == pytest.approx(near_MLR.sum(), rel=0.06)
        assert work.far_MLR.sum() == pytest.approx(far_MLR.sum(), rel=far_error)


def test_random_orders_of_ids_keep_groups_together() -> None:
    trace = grouped_trace(4)
    schedule = one_sequence_each(4)
    order_LE = random_orders(trace.num_layers, trace.num_experts, 3, GROUPS)
    permuted = trace.permuted(order_LE)
    ids_TLK = permuted.expert_ids.astype(np.int64) // (EXPERTS // GROUPS)
    assert max(len(set(groups.tolist())) for groups in ids_TLK.reshape(-1, TOP_K)[:500]) == CHOSEN
    counts = Workload.from_trace(trace, schedule).token_counts_MLRE.swapaxes(1, 2)
    expected = permute_experts(counts, order_LE).swapaxes(1, 2)
    assert np.array_equal(Workload.from_trace(permuted, schedule).token_counts_MLRE, expected)
    assert not np.array_equal(expected, counts.swapaxes(1, 2))


@pytest.mark.parametrize("far_s", [0.0, 1e-5])
def test_homes_leave_their_node_only_where_that_pays(far_s: float) -> None:
    """Groups are used nearly alike, on a node each; of each, the experts of its first rank are hot.

    Between nodes a token needs one transfer for all its experts of a group. Where transfers are free, the best homes
    level nodes too.
    """
    rng, per_group, ranks = np.random.default_rng(0), EXPERTS // GROUPS, 16
    tokens, hot_E = 8192, np.where(np.arange(per_group) < per_group // 2, 3.0, 1.0)
    group_TG = np.argsort(-rng.gumbel(size=(tokens, GROUPS)) - np.linspace(0, 0.2, GROUPS), axis=1)[:, :CHOSEN]
    scores_TGE = rng.gumbel(size=(tokens, CHOSEN, per_group)) + np.log(hot_E)
    ids_TGK = np.argsort(-scores_TGE, axis=2)[:, :, : TOP_K // CHOSEN] + group_TG[:, :, None] * per_group
    trace = RoutingTrace.from_sequences(np.split(ids_TGK.reshape(tokens, 1, TOP_K), 32), num_experts=EXPERTS)
    cluster = ClusterSpec(ranks, ranks // GROUPS, slots_per_rank=0, dispatch_forwards=True)
    costs = StepCosts.of(cluster, DEEPSEEK, moe_layers=1)
    costs = replace(
        costs, operations=costs.operations._replace(near_state_s=0.0, far_state_s=0.0, near_row_s=0.0, far_row_s=far_s)
    )
    placement = Placement.contiguous(1, EXPERTS, ranks)
    planned = plan_sequences(SequenceCounts.from_trace(trace), placement, cluster, token_budget=1024, costs=costs)
    in_node, across = placement.moves(planned.placement, ranks // GROUPS)
    assert in_node.sum() + across.sum() > 0
    assert (across.sum() > 0) == (far_s == 0.0)


def test_eplb_packs_groups_onto_nodes() -> None:
    ranks, per_node = 16, 4
    cluster = ClusterSpec(ranks, per_node, slots_per_rank=2)
    trace, schedule = grouped_trace(ranks), one_sequence_each(ranks)
    sequences, placement = SequenceCounts.from_trace(trace), Placement.contiguous(2, EXPERTS, ranks)
    for costs, whole in ((StepCosts.of(cluster, DEEPSEEK), True), (None, False)):
        view = make_view(EplbOracle(), sequences, schedule, placement, cluster, token_budget=4096, costs=costs)
        plan = EplbOracle().plan(view)
        node_LGE = plan.home.reshape(2, GROUPS, -1) // per_node
        assert (node_LGE == node_LGE[:, :, :1]).all() == whole
