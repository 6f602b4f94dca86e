"""`llep`: after gating, excess tokens of overloaded ranks are moved to the least loaded ranks, with their weights.

Source: Least-Loaded Expert Parallelism (arXiv 2601.17111, github.com/SalesforceAIResearch/LeastLoadedEP); our
reimplementation. Its assignments equal the source's for every token.

Not specified by the source, and our choices:

* homes other than contiguous ones: the algorithm only needs an expert's home, so any home is possible;
* slots: a rank receives as many experts as it needs. Our plan's `slots_per_rank` is the largest number of a rank;
* the order of an expert's tokens, of which it assigns ranges: by source rank, then by position;
* when plain expert parallelism is used: below a max/mean of 1.3, the value of the source's example;
* planning time: none is published; UltraEP's is charged.

On equal terms a rank without a free slot can help only with an expert that it already has; tokens without a helper stay
at home.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner import StepPlan
from trimtab.policies.planning_time import ULTRAEP_SIZES, PlanningTime
from trimtab.policies.policy import Choices, Traits, View
from trimtab.policies.rivals.replica_quotas import split_ranges


@dataclass(frozen=True)
class Llep:
    """Moves tokens away from every rank that would compute more than its limit.

    Attributes:
        max_tokens_factor: the limit, in mean loads of a rank.
        min_tokens_per_gemm: fewest tokens of a move, unless they are the rest of an expert.
        gate: an instance whose max/mean is below is not changed. At 1, `max_tokens_factor` alone decides.
    """

    traits: ClassVar[Traits] = Traits(
        known_at="layer", planning=PlanningTime.published(*ULTRAEP_SIZES, source="UltraEP's"), copies="unbounded"
    )
    choices: ClassVar[Choices] = (
        {"gate": 1.3, "max_tokens_factor": 1.1, "min_tokens_per_gemm": 1024},
        {"gate": 1.0, "max_tokens_factor": 1.0, "min_tokens_per_gemm": 1024},
        {"gate": 1.0, "max_tokens_factor": 1.03, "min_tokens_per_gemm": 128},
        {"gate": 1.0, "max_tokens_factor": 1.1, "min_tokens_per_gemm": 128},
    )
    max_tokens_factor: float = 1.1
    min_tokens_per_gemm: int = 1024
    gate: float = 1.3

    def plan(self, view: View) -> StepPlan:
        ranks = view.cluster.ranks
        slots = view.cluster.slots_per_rank if view.equal_terms else view.num_experts

        def plan_one(_: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
            load_E = counts_RE.sum(axis=0)
            load_R = np.bincount(home_E, weights=load_E, minlength=ranks)
            if load_R.max() * ranks < self.gate * load_R.sum():
                return np.empty((0, 2), np.int64), np.empty((0, ranks), np.int64)
            shares_S4 = assign(
                load_E, ranks, self.max_tokens_factor, self.min_tokens_per_gemm, home_E=home_E, slots=slots
            )
            return split_ranges(counts_RE, shares_S4[home_E[shares_S4[:, 0]] != shares_S4[:, 1]])

        plan = view.plan_instances(plan_one, placement=view.placement, slots=slots)
        if view.equal_terms:
            return plan
        instance = np.repeat(np.arange(len(plan.replica_starts) - 1), np.diff(plan.replica_starts))
        on_rank = np.bincount(instance * ranks + plan.replica_ranks)
        return replace(plan, slots_per_rank=int(on_rank.max(initial=0)))


def assign(
    load_E: Array,
    num_ranks: int,
    max_tokens_factor: float,
    min_tokens_per_gemm: int,
    *,
    home_E: Array | None = None,
    slots: int | None = None,
) -> Array:
    """LLEP's plan for one instance: largest expert first, home first, then the ranks with the least load.

    A rank's load is the assigned tokens plus those of its own experts that are not yet assigned.

    Args:
        load_E: `[E]` int64, tokens of each expert.
        max_tokens_factor: limit of a rank, in mean loads. Tokens that fit nowhere exceed it.
        min_tokens_per_gemm: fewest tokens of a helper, unless they are the rest.
        home_E: `[E]` int64; contiguous homes by default.
        slots: experts that a rank may help with; without limit by default.

    Returns:
        `[S, 4]` int64, shares in the order in which they were made: expert, rank, first token, token after the last. An
        expert may have two shares on one rank.
    """
    num_experts = len(load_E)
    if home_E is None:
        home_E = np.arange(num_experts) // (num_experts // num_ranks)
    total = int(load_E.sum())
    limit = max(int(max_tokens_factor * (total // num_ranks)) if total >= num_ranks else total, 1)
    ranks = _Ranks(
        load_R=np.bincount(home_E, load_E, num_ranks).astype(np.int64),
        free_R=np.full(num_ranks, num_experts if slots is None else slots),
        limit=limit,
        min_tokens=min_tokens_per_gemm,
    )
    shares_S4 = np.empty((num_experts * (num_ranks + 2), 4), np.int64)
    count = _assign(load_E, np.argsort(-load_E, kind="stable"), home_E, ranks, shares_S4)
    return shares_S4[:count]


class _Ranks(NamedTuple):
    """Ranks during an assignment; the kernel changes the arrays.

    Attributes:
        load_R: `[R]` int64, tokens of every rank.
        free_R: `[R]` int64, experts that a rank may still help with.
        limit: most tokens of a rank.
        min_tokens: fewest tokens of a helper.
    """

    load_R: Array
    free_R: Array
    limit: int
    min_tokens: int


@kernel
def _assign(load_E, heaviest_first_E, home_E, ranks, shares_S4):  # type: ignore[no-untyped-def]
    """Fills `shares_S4` and returns the number of shares."""
    load_R, free_R, limit = ranks.load_R, ranks.free_R, ranks.limit
    helps_R = np.zeros(len(load_R), np.bool_)
    tried_R = np.zeros(len(load_R), np.bool_)
    count = np.int64(0)
    for e in heaviest_first_E:
        left = load_E[e]
        if left == 0:
            break
        home = home_E[e]
        load_R[home] -= left
        helps_R[:] = False
        kept = min(max(limit - load_R[home], 0), left)
        first = np.int64(0)
        if kept > 0:
            count = _add_share(shares_S4, count, (e, home, first, kept), load_R)
            first = kept
            left -= kept
        while left > 0:
            # Ranks that may help, the least loaded first.
            tried_R[:] = False
            emptiest = np.int64(-1)
            moved = np.int64(0)
            while left > 0 and (moved == 0 or kept == 0):
                rank = np.int64(-1)
                for r in range(len(load_R)):
                    may_help = r != home and not tried_R[r] and (free_R[r] > 0 or helps_R[r])
                    if may_help and (rank < 0 or load_R[r] < load_R[rank]):
                        rank = np.int64(r)
                if rank < 0:
                    break
                tried_R[rank] = True
                if emptiest < 0:
                    emptiest = rank
                share = min(left, limit - load_R[rank])
                if share <= 0 or (share < ranks.min_tokens and left > share):
                    continue
                free_R[rank] -= not helps_R[rank]
                helps_R[rank] = True
                count = _add_share(shares_S4, count, (e, rank, first, first + share), load_R)
                first += share
                left -= share
                moved += share
            if left > 0 and (kept == 0 or moved == 0):
                # No helper is below its limit: the emptiest gets the rest.
                if emptiest >= 0:
                    free_R[emptiest] -= not helps_R[emptiest]
                    helps_R[emptiest] = True
                    count = _add_share(shares_S4, count, (e, emptiest, first, first + left), load_R)
                elif kept > 0 and first == kept:
                    shares_S4[count - 1, 3] += left
                    load_R[home] += left
                else:
                    count = _add_share(shares_S4, count, (e, home, first, first + left), load_R)
                left = np.int64(0)
    return count


@kernel
def _add_share(shares_S4, count, share, load_R):  # type: ignore[no-untyped-def]
    """Appends a share (expert, rank, first token, token after the last); returns the number of shares."""
    expert, rank, first, end = share
    row = shares_S4[count]
    row[0], row[1], row[2], row[3] = expert, rank, first, end
    load_R[rank] += end - first
    return count + 1
