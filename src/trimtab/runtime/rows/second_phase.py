"""`SecondPhase`: where rows go that reach whole experts on other ranks from the experts' homes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from trimtab.runtime.rows.expert_compute import RowGroups
from trimtab.runtime.rows.instance_replicas import InstanceReplicas
from trimtab.runtime.state.flat_memory import upload
from trimtab.runtime.state.home_experts import HomeExperts


@dataclass(frozen=True, eq=False)
class SecondPhase:
    """One rank's rows of an instance in which whole experts have moved.

    Attributes:
        kept_rows, leaving_rows: int32 indices into the rows of home experts: those that stay, and those of experts that
            have moved, by rank and expert.
        kept_groups: rows of each home expert that stay, 0 for experts that have moved.
        came_groups: rows of each expert that has moved here, by slot.
        send_splits, recv_splits: rows to and from each rank.
    """

    kept_rows: torch.Tensor
    leaving_rows: torch.Tensor
    kept_groups: RowGroups
    came_groups: RowGroups
    send_splits: list[int]
    recv_splits: list[int]

    @classmethod
    def of(cls, homes: HomeExperts, rank: int, home_counts: list[int], replicas: InstanceReplicas) -> SecondPhase:
        """The second phase of a rank, on the host.

        Args:
            home_counts: rows of each home expert of the rank, in the order of rows in its tensors.
            replicas: whole experts, ordered by rank, home and row; their quotas are all rows.
        """
        num_ranks = replicas.quotas_PR.shape[1]
        tokens_P = replicas.quotas_PR.sum(axis=1)
        starts = np.cumsum(home_counts) - home_counts
        stays = np.ones(sum(home_counts), np.bool_)
        kept_counts = np.array(home_counts, np.int64)
        leaving: list[np.ndarray] = []
        send, receive = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
        for replica, tokens in zip(replicas.located(homes), tokens_P.tolist(), strict=True):
            if replica.home == rank:
                rows = np.arange(starts[replica.row], starts[replica.row] + tokens, dtype=np.int32)
                leaving.append(rows)
                stays[rows] = False
                kept_counts[replica.row] = 0
                send[replica.rank] += tokens
            if replica.rank == rank:
                receive[replica.home] += tokens
        came = tokens_P[replicas.ranks == rank]
        return cls(
            torch.from_numpy(np.flatnonzero(stays).astype(np.int32)),
            torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *leaving])),
            RowGroups.on_host(kept_counts),
            RowGroups.on_host(came),
            send.tolist(),
            receive.tolist(),
        )

    def on(self, device: torch.device) -> SecondPhase:
        """The same on a device; the host does not wait for the copies."""
        kept_rows, leaving_rows = upload([self.kept_rows, self.leaving_rows], device)
        kept_ends, came_ends = upload([self.kept_groups.ends, self.came_groups.ends], device)
        return replace(
            self,
            kept_rows=kept_rows,
            leaving_rows=leaving_rows,
            kept_groups=replace(self.kept_groups, ends=kept_ends),
            came_groups=replace(self.came_groups, ends=came_ends),
        )
