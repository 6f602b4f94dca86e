"""Layouts of all ranks compared with plain loops over a plan."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.random_plans import random_placement, random_plan, random_schedule, random_trace
from trimtab.array_type import Array
from trimtab.planner import Workload
from trimtab.runtime.program.physical_experts import InstanceReplicas, PhysicalExperts, PlannedRows
from trimtab.runtime.program.program import place_rows
from trimtab.runtime.state.expert_places import ExpertPlaces


def planned_rows(ids_NK: Array, counts_RE: Array, experts: PhysicalExperts, replicas: InstanceReplicas) -> PlannedRows:
    return PlannedRows.of(
        ids_NK, counts_RE[experts.rank], counts_RE[:, experts.places.experts_RH[experts.rank]], experts, replicas
    )


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
        places = ExpertPlaces.at(placement.home[0])
        parts, physical = [], []
        for rank in range(num_ranks):
            experts = PhysicalExperts.of(places, rank, range(num_ranks), 2)
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


@given(ranks=st.integers(1, 5), per_rank=st.integers(1, 3), slots=st.integers(0, 2), seed=st.integers(0, 2**32 - 1))
def test_a_framework_gets_what_its_own_count_of_the_ids_gives(ranks: int, per_rank: int, slots: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_experts, local = ranks * per_rank, per_rank + slots
    positions = rng.permutation(ranks)
    places = ExpertPlaces.at(np.repeat(np.arange(ranks), per_rank))
    ids_R = [rng.integers(num_experts, size=(rng.integers(0, 9), 2)) for _ in range(ranks)]
    counts_RE = np.stack([np.bincount(ids.reshape(-1), minlength=num_experts) for ids in ids_R])
    nothing = InstanceReplicas.none(ranks)
    layouts = []
    for rank, ids in enumerate(ids_R):
        experts = PhysicalExperts.of(places, rank, positions.tolist(), slots)
        layouts.append(place_rows(planned_rows(ids, counts_RE, experts, nothing), has_places=False))
    for rank, layout in enumerate(layouts):
        outer = int(positions[rank])
        # By the framework's number of each rank: what it sends to each physical expert, counted from the ids alone.
        sent = {
            int(positions[r]): np.bincount(layouts[r].physical_ids.reshape(-1).long(), minlength=ranks * local)
            for r in range(ranks)
        }
        sent_RP = np.stack([sent[r] for r in range(ranks)])
        assert layout.send_splits == sent_RP[outer].reshape(ranks, local).sum(axis=1).tolist()
        arriving_RG = sent_RP[:, outer * local : (outer + 1) * local]
        assert layout.recv_splits == arriving_RG.sum(axis=1).tolist()
        assert layout.arriving is not None
        np.testing.assert_array_equal(layout.on(torch.device("cpu")).arriving, arriving_RG)  # type: ignore[arg-type]
        assert layout.arrivals is not None
        for arrivals, expected_RG in zip(layout.arrivals, (arriving_RG[:, :per_rank], arriving_RG), strict=True):
            np.testing.assert_array_equal(arrivals.by_rank, expected_RG)
            np.testing.assert_array_equal(arrivals.counts, expected_RG.sum(axis=0))
