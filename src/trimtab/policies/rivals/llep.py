"""`llep`: after gating, excess tokens of overloaded ranks are moved to the least loaded ranks, with their weights.

Source: Least-Loaded Expert Parallelism (arXiv 2601.17111, github.com/SalesforceAIResearch/LeastLoadedEP), whose
assignments `assign` reproduces for every token.

Not specified by the source, and our choices:

* homes other than contiguous ones: the algorithm only needs an expert's home, so any home is possible;
* slots: a rank receives as many experts as it needs. Our plan's `slots_per_rank` is the largest number of a rank;
* the order of an expert's tokens, of which it assigns ranges: by source rank, then by position;
* when plain expert parallelism is used: below a max/mean of 1.3, the value of the source's example.

On equal terms a rank without a free slot can help only with an expert that it already has; tokens without a helper stay
at home.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import kernel
from trimtab.planner import StepPlan
from trimtab.policies.policy import Traits, View


@dataclass(frozen=True)
class Llep:
    """Moves tokens away from every rank that would compute more than its limit.

    Attributes:
        max_tokens_factor: the limit, in mean loads of a rank.
        min_tokens_per_gemm: fewest tokens of a move, unless they are the rest of an expert.
        gate: an instance whose max/mean is below is not changed. At 1, `max_tokens_factor` alone decides.
    """

    traits: ClassVar[Traits] = Traits(known_at="layer", planning_us_per_rank=3.0, copies="unbounded")
    max_tokens_factor: float = 1.1
    min_tokens_per_gemm: int = 1024
    gate: float = 1.3

    def plan(self, view: View) -> StepPlan:
        ranks = view.cluster.ranks
        slots = view.cluster.slots_per_rank if view.equal_terms else view.num_experts

        def plan_one(layer: int, counts_RE: Array, home_E: Array) -> tuple[Array, Array]:
            load_E = counts_RE.sum(axis=0)
            load_R = np.bincount(home_E, weights=load_E, minlength=ranks)
            if load_R.max() * ranks < self.gate * load_R.sum():
                return np.empty((0, 2), np.int64), np.empty((0, ranks), np.int64)
            shares_S4 = assign(
                load_E, ranks, self.max_tokens_factor, self.min_tokens_per_gemm, home_E=home_E, slots=slots
            )
            replicas_P2, quotas_PR = _split_ranges(counts_RE, home_E, shares_S4)
            return replicas_P2, quotas_PR

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
    shares_S4 = np.empty((num_experts * (num_ranks + 2), 4), np.int64)
    free_R = np.full(num_ranks, num_experts if slots is None else slots)
    count = _assign(load_E, home_E, limit, min_tokens_per_gemm, free_R, shares_S4)
    return shares_S4[:count]


@kernel
def _assign(load_E, home_E, limit, min_tokens, free_R, shares_S4):  # type: ignore[no-untyped-def]
    num_ranks = len(free_R)
    load_R = np.zeros(num_ranks, np.int64)
    for e in range(len(load_E)):
        load_R[home_E[e]] += load_E[e]
    helps = np.zeros(num_ranks, np.bool_)
    count = 0
    for e in np.argsort(-load_E, kind="mergesort"):
        left = load_E[e]
        if left == 0:
            break
        home = home_E[e]
        load_R[home] -= left
        helps[:] = False
        kept = min(max(limit - load_R[home], 0), left)
        first = 0
        if kept > 0:
            count = _add_share(shares_S4, count, e, home, first, kept, load_R)
            first = kept
            left -= kept
        spills_at_once = kept == 0
        while left > 0:
            order = np.argsort(load_R, kind="mergesort")
            emptiest = -1
            moved = np.int64(0)
            for r in order:
                if r == home or (free_R[r] == 0 and not helps[r]):
                    continue
                if emptiest < 0:
                    emptiest = r
                share = min(left, limit - load_R[r])
                if share <= 0 or (share < min_tokens and left > share):
                    continue
                if not helps[r]:
                    helps[r] = True
                    free_R[r] -= 1
                count = _add_share(shares_S4, count, e, r, first, first + share, load_R)
                first += share
                left -= share
                moved += share
                if left == 0 or not spills_at_once:
                    break
            if left > 0 and (spills_at_once or moved == 0):
                taker = emptiest if emptiest >= 0 else home
                if taker != home and not helps[taker]:
                    helps[taker] = True
                    free_R[taker] -= 1
                if taker == home and kept > 0 and first == kept:
                    shares_S4[count - 1, 3] += left
                    load_R[home] += left
                else:
                    count = _add_share(shares_S4, count, e, taker, first, first + left, load_R)
                left = 0
    return count


@kernel
def _add_share(shares_S4, count, expert, rank, first, end, load_R):  # type: ignore[no-untyped-def]
    shares_S4[count] = expert, rank, first, end
    load_R[rank] += end - first
    return count + 1


@kernel
def _split_ranges(counts_RE, home_E, shares_S4):  # type: ignore[no-untyped-def]
    """Replicas `[P, 2]` and quotas `[P, R]` of `[S, 4]` shares; those of an expert on one rank are one replica."""
    num_ranks = len(counts_RE)
    replicas_P2 = np.empty((len(shares_S4), 2), np.int64)
    quotas_PR = np.zeros((len(shares_S4), num_ranks), np.int64)
    num_replicas = 0
    of_expert = 0
    for s in range(len(shares_S4)):
        expert, rank, first, end = shares_S4[s]
        if s == 0 or expert != shares_S4[s - 1, 0]:
            of_expert = num_replicas
        if rank == home_E[expert]:
            continue
        p = of_expert
        while p < num_replicas and replicas_P2[p, 1] != rank:
            p += 1
        if p == num_replicas:
            replicas_P2[p] = expert, rank
            num_replicas += 1
        before = np.int64(0)
        for source in range(num_ranks):
            after = before + counts_RE[source, expert]
            quotas_PR[p, source] += max(min(after, end) - max(before, first), 0)
            before = after
    return replicas_P2[:num_replicas], quotas_PR[:num_replicas]
