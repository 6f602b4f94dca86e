"""`routepack`: homes once a step and sequences packed into micro-steps, both from replayed routing; no replicas.

Source: RoutePack (arXiv 2608.12146); our reimplementation from a second-hand reading of the paper, as it has no
public code. After rollout, each layer's homes are set by LPT from the step's replayed loads. Homes come first because
packing cannot reduce the busiest rank's total below what they give. Then whole sequences are packed into as few
micro-steps as hold them, by population annealing: P chains run at the same temperature, which decreases in stages;
chains are resampled at each stage. They start from different schedules, and the best plan found is kept. A micro-step
costs its busiest rank's rows in every layer and the busiest data rank's attention, `a * sum(t) + b * sum(t^2)`. The
paper reports trainer throughput on GSM8K for two models: Ling-3.0 Tiny +3.80% with placement alone and +8.85% with
packing, Ling-3.0 Flash +10.50% and +14.89%.

Not specified by the source, and our choices:

* the moves: swap two sequences of a mini-batch between places (micro-step and data rank), or take one to another place,
  within the token budget;
* the starts: one chain begins at the given schedule, the others after random moves from it;
* the temperatures: from the size of a random move to 1e-5 of a micro-step's cost;
* the number of micro-steps: that of the given schedule;
* moves of homes: a layer keeps its homes where LPT gains little, and LPT's ranks are permuted so that few experts move,
  both to save transfers;
* several EP groups, and the tie-breaks between them, are not included. Rows of unknown route are not counted.

With `View.equal_terms`, homes and schedule are fixed, so the plan is that of `static`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from trimtab.array_type import Array
from trimtab.kernels import copy_values, kernel
from trimtab.planner import Placement, Schedule, StepPlan, Workload, plan_step
from trimtab.policies.planning_time import PlanningTime
from trimtab.policies.policy import Traits, View
from trimtab.policies.rivals.lpt_homes import level_homes
from trimtab.policies.static import Static


@dataclass(frozen=True)
class RoutePack:
    """Homes by LPT, then sequences packed by population annealing.

    Attributes:
        attention_per_token, attention_per_pair: a and b, in expert rows per layer. The defaults are for Qwen3-30B-A3B:
            forward operations per token (37.7 M, projections) and per token pair (8,192; only
            half of the pairs are causal), each divided by the 9.4 M operations of an expert row.
        evaluations: moves tried in all.
        population: chains.
        temperatures: stages of cooling.
        smallest_gain: least reduction of max/mean over ranks for which a layer's homes are moved.
        seed: of the annealing.
    """

    traits: ClassVar[Traits] = Traits(
        known_at="step",
        planning=PlanningTime.measured("routepack"),
        transfers_start="never",
        copies="none",
        relocates=True,
    )
    attention_per_token: float = 4.0
    attention_per_pair: float = 0.00087
    evaluations: int = 2_000_000
    population: int = 8
    temperatures: int = 24
    smallest_gain: float = 0.1
    seed: int = 0

    def plan(self, view: View) -> StepPlan:
        if view.equal_terms:
            return Static().plan(view)
        loads_LE = view.workload.token_counts_MLRE.sum(axis=(0, 2), dtype=np.int64)
        ranks = view.cluster.ranks
        placement = Placement(level_homes(loads_LE, view.placement.home, ranks, ranks, self.smallest_gain))
        schedule = self.pack(view, placement)
        workload = Workload.from_sequences(view.sequences, schedule)
        return plan_step(workload, schedule, placement, replace(view.cluster, slots_per_rank=0))

    def pack(self, view: View, placement: Placement) -> Schedule:
        """A schedule that costs no more than the given one, with as many micro-steps and the same mini-batches."""
        schedule = view.schedule
        micro_step_S, rank_S = anneal_schedule(
            Problem(
                rows_SLR=view.sequences.rows_by_place(placement.home, schedule.num_ranks, np.arange(view.num_layers)),
                attention_S=self.attention(view),
                lengths_S=view.sequences.lengths,
                mini_batch_M=schedule.mini_batch_of_micro_step.astype(np.int64),
                num_ranks=schedule.num_ranks,
                token_budget=view.token_budget,
            ),
            schedule.micro_step.astype(np.int64),
            schedule.rank.astype(np.int64),
            Annealing(self.evaluations, self.population, self.temperatures),
            np.random.default_rng(self.seed),
        )
        return Schedule(
            micro_step_S.astype(np.int32),
            rank_S.astype(np.int32),
            schedule.mini_batch_of_micro_step,
            schedule.num_ranks,
        )

    def attention(self, view: View) -> Array:
        """`[S]` float64, attention of each sequence over all layers, in expert rows."""
        lengths_S = view.sequences.lengths
        return view.num_layers * (self.attention_per_token * lengths_S + self.attention_per_pair * lengths_S**2.0)


class Problem(NamedTuple):
    """Sequences to schedule.

    Attributes:
        rows_SLR: `[S, L, R]` int32 expert rows by sequence, layer and home rank.
        attention_S: `[S]` float64, in rows.
        lengths_S: `[S]` int64 tokens.
        mini_batch_M: `[M]` int64, mini-batch of each micro-step; sequences keep theirs.
        num_ranks: data ranks.
        token_budget: most tokens of a place after a move.
    """

    rows_SLR: Array
    attention_S: Array
    lengths_S: Array
    mini_batch_M: Array
    num_ranks: int
    token_budget: int


class Annealing(NamedTuple):
    """Effort of the search: see `RoutePack`."""

    evaluations: int
    population: int
    temperatures: int


class _Chains(NamedTuple):
    """Current schedules of P chains.

    Attributes:
        steps_PS, ranks_PS: `[P, S]` int64, place of each sequence.
        loads_PMLR: `[P, M, L, R]` int64 expert rows.
        attention_PMR: `[P, M, R]` float64, in rows.
        tokens_PMR: `[P, M, R]` int64.
        cost_PM: `[P, M]` float64, in rows.
    """

    steps_PS: Array
    ranks_PS: Array
    loads_PMLR: Array
    attention_PMR: Array
    tokens_PMR: Array
    cost_PM: Array


@kernel
def anneal_schedule(problem, micro_step_S, rank_S, annealing, rng):  # type: ignore[no-untyped-def]
    """Population annealing of places (micro-step, data rank) for sequences.

    Args:
        problem: `Problem`.
        micro_step_S, rank_S: `[S]` int64, the places to start from.
        annealing: `Annealing`.
        rng: a NumPy random generator.

    Returns:
        Micro-steps and ranks `[S]`, int64, of the cheapest schedule found, which may be the first.
    """
    num_sequences, num_micro_steps, population = len(rank_S), len(problem.mini_batch_M), annealing.population
    chains = _start(problem, micro_step_S, rank_S, population)
    best_steps, best_ranks, best_cost = micro_step_S.copy(), rank_S.copy(), chains.cost_PM[0].sum()
    if num_sequences == 0 or num_micro_steps * problem.num_ranks == 1:
        return best_steps, best_ranks
    moved = 0.0
    for i in range(64):
        moved += abs(_try_move(problem, chains, i % population, 0.0, rng)[1]) / 64
    coldest = 1e-5 * best_cost / num_micro_steps
    hottest = max(moved, 2 * coldest)
    tries = max(1, annealing.evaluations // (population * annealing.temperatures))
    temperature = np.inf
    for stage in range(annealing.temperatures):
        cooler = hottest * (coldest / hottest) ** (stage / max(1, annealing.temperatures - 1))
        if stage > 0:
            cost_P = np.zeros(population)
            for p in range(population):
                for m in range(num_micro_steps):
                    cost_P[p] += chains.cost_PM[p, m]
            chosen = _resample(cost_P, 1 / cooler - 1 / temperature, rng)
            chains = _Chains(
                chains.steps_PS[chosen],
                chains.ranks_PS[chosen],
                chains.loads_PMLR[chosen],
                chains.attention_PMR[chosen],
                chains.tokens_PMR[chosen],
                chains.cost_PM[chosen],
            )
        temperature = cooler
        for p in range(population):
            cost = chains.cost_PM[p].sum()
            chain_temperature = temperature
            if stage == 0:
                chain_temperature = np.inf if p > 0 else coldest
            for _ in range(tries):
                accepted, delta = _try_move(problem, chains, p, chain_temperature, rng)
                if accepted:
                    cost += delta
                    if cost < best_cost - 1e-6:
                        best_cost = cost
                        copy_values(chains.steps_PS[p], best_steps)
                        copy_values(chains.ranks_PS[p], best_ranks)
    return best_steps, best_ranks


@kernel
def _start(problem, micro_step_S, rank_S, population):  # type: ignore[no-untyped-def]
    """Equal chains of the given places."""
    num_sequences, num_layers, num_homes = problem.rows_SLR.shape
    num_micro_steps = len(problem.mini_batch_M)
    chains = _Chains(
        np.empty((population, num_sequences), np.int64),
        np.empty((population, num_sequences), np.int64),
        np.zeros((population, num_micro_steps, num_layers, num_homes), np.int64),
        np.zeros((population, num_micro_steps, problem.num_ranks)),
        np.zeros((population, num_micro_steps, problem.num_ranks), np.int64),
        np.zeros((population, num_micro_steps)),
    )
    for p in range(population):
        copy_values(micro_step_S, chains.steps_PS[p])
        copy_values(rank_S, chains.ranks_PS[p])
        for s in range(num_sequences):
            for layer in range(num_layers):
                for r in range(num_homes):
                    chains.loads_PMLR[p, micro_step_S[s], layer, r] += problem.rows_SLR[s, layer, r]
            chains.attention_PMR[p, micro_step_S[s], rank_S[s]] += problem.attention_S[s]
            chains.tokens_PMR[p, micro_step_S[s], rank_S[s]] += problem.lengths_S[s]
        for m in range(num_micro_steps):
            for layer in range(num_layers):
                chains.cost_PM[p, m] += chains.loads_PMLR[p, m, layer].max()
            chains.cost_PM[p, m] += chains.attention_PMR[p, m].max()
    return chains


@kernel
def _try_move(problem, chains, p, temperature, rng):  # type: ignore[no-untyped-def]
    """Swap two sequences of chain p, or move one, if the temperature accepts it.

    Returns (accepted, change of cost); the change is 0.0 for an invalid move. At temperature 0 the move is only
    evaluated.
    """
    rows_SLR, attention_S, lengths_S, mini_batch_M, _, token_budget = problem
    steps_S, ranks_S, loads_MLR = chains.steps_PS[p], chains.ranks_PS[p], chains.loads_PMLR[p]
    attention_MR, tokens_MR, cost_M = chains.attention_PMR[p], chains.tokens_PMR[p], chains.cost_PM[p]
    s = int(rng.random() * len(lengths_S))
    from_m, from_r = steps_S[s], ranks_S[s]
    t = -1
    if rng.random() < 0.75:
        t = int(rng.random() * len(lengths_S))
        to_m, to_r = steps_S[t], ranks_S[t]
    else:
        to_m, to_r = int(rng.random() * len(mini_batch_M)), int(rng.random() * tokens_MR.shape[1])
    if mini_batch_M[from_m] != mini_batch_M[to_m] or (from_m == to_m and from_r == to_r):
        return False, 0.0
    tokens = lengths_S[s] - (lengths_S[t] if t >= 0 else 0)
    if tokens > 0 and tokens_MR[to_m, to_r] + tokens > token_budget:
        return False, 0.0
    if tokens < 0 and tokens_MR[from_m, from_r] - tokens > token_budget:
        return False, 0.0
    attention = attention_S[s] - (attention_S[t] if t >= 0 else 0.0)
    from_cost, to_cost = 0.0, 0.0
    if from_m != to_m:
        for layer in range(rows_SLR.shape[1]):
            from_most, to_most = np.int64(0), np.int64(0)
            for r in range(rows_SLR.shape[2]):
                rows = rows_SLR[s, layer, r] - (rows_SLR[t, layer, r] if t >= 0 else 0)
                from_most = max(from_most, loads_MLR[from_m, layer, r] - rows)
                to_most = max(to_most, loads_MLR[to_m, layer, r] + rows)
            from_cost += from_most
            to_cost += to_most
    else:
        from_cost = cost_M[from_m] - attention_MR[from_m].max()
    from_attention, to_attention = 0.0, 0.0
    for r in range(attention_MR.shape[1]):
        gone = attention if r == from_r else 0.0
        come = attention if r == to_r else 0.0
        if from_m == to_m:
            gone -= come
        from_attention = max(from_attention, attention_MR[from_m, r] - gone)
        to_attention = max(to_attention, attention_MR[to_m, r] + come)
    from_cost += from_attention
    delta = from_cost - cost_M[from_m]
    if from_m != to_m:
        to_cost += to_attention
        delta += to_cost - cost_M[to_m]
    if temperature == 0.0 or (delta > 0 and rng.random() >= np.exp(-delta / temperature)):
        return False, delta
    if from_m != to_m:
        for layer in range(rows_SLR.shape[1]):
            for r in range(rows_SLR.shape[2]):
                rows = rows_SLR[s, layer, r] - (rows_SLR[t, layer, r] if t >= 0 else 0)
                loads_MLR[from_m, layer, r] -= rows
                loads_MLR[to_m, layer, r] += rows
        cost_M[to_m] = to_cost
    cost_M[from_m] = from_cost
    attention_MR[from_m, from_r] -= attention
    attention_MR[to_m, to_r] += attention
    tokens_MR[from_m, from_r] -= tokens
    tokens_MR[to_m, to_r] += tokens
    steps_S[s], ranks_S[s] = to_m, to_r
    if t >= 0:
        steps_S[t], ranks_S[t] = from_m, from_r
    return True, delta


@kernel
def _resample(cost_P, colder, rng):  # type: ignore[no-untyped-def]
    """Chains to continue, `[P]`: each in proportion to its Boltzmann weight, by systematic resampling."""
    weights = np.exp(-(cost_P - cost_P.min()) * colder)
    edges = np.cumsum(weights) / weights.sum() * len(cost_P)
    offset = rng.random()
    chosen = np.empty(len(cost_P), np.int64)
    at = 0
    for p in range(len(cost_P)):
        while at < len(cost_P) - 1 and edges[at] < p + offset:
            at += 1
        chosen[p] = at
    return chosen
