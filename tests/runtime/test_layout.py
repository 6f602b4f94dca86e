"""Layouts of all ranks compared with plain loops over a plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from helpers.random_plans import random_placement, random_plan, random_schedule, random_trace
from trimtab.array_type import Array
from trimtab.planner import Workload
from trimtab.runtime.rows.layout import Layout, place_rows
from trimtab.runtime.rows.physical_experts import InstanceReplicas, PhysicalExperts, PlannedRows
from trimtab.runtime.state.expert_places import ExpertPlaces

Row = tuple[int, int, int]  # source rank, token, expert


def rows_by_copy(
    ids_R: list[Array], home_E: Array, replicas: InstanceReplicas
) -> dict[tuple[int, str, int], list[Row]]:
    """The rows of each copy: of a source's tokens for an expert, replicas get their quotas first, the home the rest."""
    copies: dict[tuple[int, str, int], list[Row]] = {}
    for source, ids_NK in enumerate(ids_R):
        for expert in range(len(home_E)):
            tokens = np.flatnonzero((ids_NK == expert).any(axis=1)).tolist()
            for p in np.flatnonzero(replicas.experts == expert):
                quota = int(replicas.quotas_PR[p, source])
                key = (int(replicas.ranks[p]), "replica", int(replicas.slots[p]))
                copies.setdefault(key, []).extend((source, token, expert) for token in tokens[:quota])
                tokens = tokens[quota:]
            key = (int(home_E[expert]), "home", expert)
            copies.setdefault(key, []).extend((source, token, expert) for token in tokens)
    return copies


def arrived_at(rank: int, layouts: list[Layout], ids_R: list[Array]) -> list[Row]:
    """The rows that a rank receives, in rank order of the sources."""
    rows: list[Row] = []
    for source, (layout, ids_NK) in enumerate(zip(layouts, ids_R, strict=True)):
        sent: list[Row] = [(-1, -1, -1)] * ids_NK.size
        for token, places in enumerate(layout.row_places.tolist()):
            for k, place in enumerate(places):
                assert int(layout.row_tokens[place]) == token
                sent[place] = (source, token, int(ids_NK[token, k]))
        start = sum(layout.send_splits[:rank])
        rows += sent[start : start + layout.send_splits[rank]]
    assert len(rows) == sum(layouts[rank].recv_splits)
    return rows


def planned_rows(ids_NK: Array, counts_RE: Array, experts: PhysicalExperts, replicas: InstanceReplicas) -> PlannedRows:
    return PlannedRows.of(ids_NK, counts_RE[experts.rank], counts_RE[:, experts.is_here_E], experts, replicas)


def test_every_copy_computes_its_planned_tokens() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        num_ranks = int(rng.integers(1, 5))
        num_experts = num_ranks * int(rng.integers(1, 4))
        trace = random_trace(
            rng, num_sequences=6, max_length=20, num_layers=1, num_experts=num_experts, top_k=min(2, num_experts)
        )
        schedule = random_schedule(rng, 6, num_ranks=num_ranks, num_micro_steps=1)
        workload = Workload.from_trace(trace, schedule)
        placement = random_placement(rng, 1, num_experts, num_ranks)
        plan = random_plan(rng, workload, schedule, slots=3, placement=placement)
        ids_R = [trace.select(schedule.sequences_of(rank)).expert_ids[:, 0] for rank in range(num_ranks)]
        replicas, counts_RE = InstanceReplicas.of(plan, 0, 0), workload.token_counts_MLRE[0, 0]
        home_E = placement.home[0]
        homes: Any = SimpleNamespace(home_E=home_E, rows_E=np.empty(num_experts, np.int64))
        for rank in range(num_ranks):
            # After moves rows are in any order.
            homes.rows_E[home_E == rank] = rng.permutation(num_experts // num_ranks)
        placed = []
        for rank, ids in enumerate(ids_R):
            experts = PhysicalExperts.of(homes, rank, range(num_ranks), 3)
            placed.append(place_rows(planned_rows(np.ascontiguousarray(ids), counts_RE, experts, replicas)))
        layouts = [layout.on(torch.device("cpu")) for layout in placed]
        expected = rows_by_copy(ids_R, home_E, replicas)
        for rank, layout in enumerate(layouts):
            arrived = arrived_at(rank, layouts, ids_R)
            home = [arrived[row] for row in layout.home_rows.tolist()]
            by_row = sorted(np.flatnonzero(home_E == rank).tolist(), key=lambda expert: homes.rows_E[expert])
            for expert, count in zip(by_row, layout.home_groups.counts, strict=True):
                assert home[:count] == expected[rank, "home", expert], seed
                home = home[count:]
            replica = [arrived[row] for row in layout.replica_rows.tolist()]
            for slot, count in enumerate(layout.replica_groups.counts):
                assert replica[:count] == expected[rank, "replica", slot], seed
                replica = replica[count:]
            assert (home, replica) == ([], []), seed


def test_rows_keep_their_planned_copy_unless_their_expert_is_another() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        num_ranks, num_experts, top_k = int(rng.integers(1, 4)), 6, int(rng.integers(1, 4))
        trace = random_trace(
            rng, num_sequences=6, max_length=9, num_layers=1, num_experts=num_experts, top_k=top_k, unknown=0.2
        )
        schedule = random_schedule(rng, 6, num_ranks=num_ranks, num_micro_steps=1)
        workload, placement = Workload.from_trace(trace, schedule), random_placement(rng, 1, num_experts, num_ranks)
        replicas = InstanceReplicas.of(random_plan(rng, workload, schedule, slots=2, placement=placement), 0, 0)
        places = ExpertPlaces.first(placement.home[0])
        homes: Any = SimpleNamespace(home_E=places.home_E, rows_E=places.rows_E)
        parts, physical = [], []
        for rank in range(num_ranks):
            experts = PhysicalExperts.of(homes, rank, range(num_ranks), 2)
            recorded = np.ascontiguousarray(trace.select(schedule.sequences_of(rank)).expert_ids[:, 0])
            planned = planned_rows(recorded, workload.token_counts_MLRE[0, 0], experts, replicas)
            ids = np.argsort(rng.random((len(recorded), num_experts)))[:, :top_k]
            is_kept = (rng.random(len(ids)) < 0.5) & (recorded[:, 0] < num_experts)
            ids[is_kept] = rng.permuted(recorded[is_kept], axis=1)
            rows, num_deviating = planned.with_ids(ids)
            expected, differ = experts.home_ids_E[ids], 0
            for n, k in np.ndindex(ids.shape):
                if ids[n, k] in recorded[n]:
                    expected[n, k] = planned.physical_NK[n, recorded[n].tolist().index(ids[n, k])]
                else:
                    differ += int(recorded[n, 0] < num_experts)
            assert np.array_equal(rows.physical_NK, expected)
            assert num_deviating == differ
            parts.append(rows)
            physical.append(expected)
        sent_RP = np.stack([rows.sent_P for rows in parts])
        for rank, rows in enumerate(parts):
            arriving_RG = rows.receiving(sent_RP).arriving_RG
            for source, group in np.ndindex(arriving_RG.shape):
                number = rank * rows.experts.num_local + group
                assert arriving_RG[source, group] == (physical[source] == number).sum(), seed
