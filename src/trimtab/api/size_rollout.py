"""`trimtab.size_rollout`: attention and experts of a rollout on the same ranks or on separate ones, and how many."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np

from trimtab.api import run_kinds
from trimtab.api.run import Run, checked
from trimtab.cluster.model_names import hub_ids, preset_of
from trimtab.cluster.spec_files import load_node
from trimtab.cluster.specs import AUTO, AUTO_SLOTS
from trimtab.errors import InputError
from trimtab.kinds import positive, price
from trimtab.report.number_text import bytes_text, seconds
from trimtab.report.rollout_sizing import engine_settings, rollout_answer
from trimtab.simulator.comparison_case import step_of
from trimtab.sizing.decode_costs import DecodeCosts
from trimtab.sizing.deployments import MICRO_BATCHES, SEQUENCES, Deployment, Search
from trimtab.sizing.expert_times import ExpertTimes
from trimtab.trace import RoutingTrace
from trimtab.trace.store import Source, open_trace

# MegaScale-Infer's limit of the time between tokens (arXiv 2504.02263), in milliseconds.
TOKEN_MS = 150
# Tokens of a micro-batch of all ranks.
MOST_TOKENS = 1 << 16


@dataclass(frozen=True, eq=False, repr=False)
class RolloutSizing:
    """The best deployments of a rollout.

    Attributes:
        source: name of the trace's file or files.
        deployments: the best colocated ones without and with copies of hot experts, and the best with separate ranks;
            those that don't exist are missing.
        search: what they were searched among, with times of experts and costs.
    """

    source: str
    deployments: tuple[Deployment, ...]
    search: Search

    def best(self, *, colocated: bool) -> Deployment | None:
        """The best with colocated ranks, or with separate ones; None without one."""
        found = [each for each in self.deployments if each.colocated == colocated]
        return max(found, key=lambda each: each.worth, default=None)

    @property
    def answer(self) -> str:
        """Whether separate ranks pay, and which side waits, in a few sentences."""
        return rollout_answer(self.best(colocated=True), self.best(colocated=False))

    @property
    def commands(self) -> list[str]:
        """Commands that start engines with the best separate ranks."""
        search = self.search
        nodes = search.attention.cluster.ranks_per_node, search.experts.cluster.ranks_per_node
        preset = search.attention.model.name
        hub_id = next((each for each in hub_ids() if preset_of(each) == preset), preset)
        return engine_settings(self.best(colocated=False), hub_id, min(nodes))

    def figures(self) -> dict[str, Any]:
        """What `trimtab rollout --json` writes.

        answer: whether separate ranks pay, and which side waits.
        settings: of the search.
        trace: name of the trace's file or files.
        model: name of the model.
        context: tokens in the KV cache of a sequence, the mean.
        most_gpus: of a deployment.
        most_token_ms: limit of the time per output token, in milliseconds.
        deployments: the best, without and with copies of hot experts, colocated and separate.
        commands: those that start engines with the best separate ranks.
        gpus: all ranks. tokens_per_s: of all ranks.
        """
        search = self.search
        derived = (
            "gpus", "tokens_per_s", "tokens_per_s_per_gpu", "tokens_per_money", "least_micro_batches",
            "attention_idle", "expert_idle",
        )  # fmt: skip
        return {
            "schema": "trimtab-rollout-1",
            "answer": self.answer,
            "settings": {
                "trace": self.source,
                "model": search.attention.model.name,
                "context": search.attention.context,
                "most_gpus": search.most_gpus,
                "most_token_ms": search.most_token_s * 1e3,
            },
            "deployments": [
                asdict(each) | {name: getattr(each, name) for name in derived} for each in self.deployments
            ],
            "commands": self.commands,
        }

    def __repr__(self) -> str:
        return f"RolloutSizing: {self.source}, {self.search.attention.model.name}\n  {self.answer}"


def size_rollout(
    trace: RoutingTrace | Source,
    run: Run = Run(),  # noqa: B008
    *,
    expert_cluster: Annotated[str | os.PathLike[str] | None, run_kinds.cluster] = None,
    gpus: Annotated[int, positive] = 64,
    token_ms: Annotated[int, positive] = TOKEN_MS,
    context: Annotated[int | None, positive] = None,
    micro_batches: Annotated[Sequence[int], positive] = MICRO_BATCHES,
    gpu_hour: Annotated[float | None, price] = None,
    expert_gpu_hour: Annotated[float | None, price] = None,
) -> RolloutSizing:
    """Size the decode of a rollout: expert parallelism with attention and experts on the same ranks against the best
    numbers of attention and expert ranks, with micro-batches that go back and forth. Experts take the time of the
    busiest rank by the trace, with and without copies of hot experts.

    Copies of hot experts are placed by the loads of the step before, if there is one.

    Args:
        trace: as in `simulate`.
        run: cluster and model; its step is the one whose tokens are decoded, and its slots are copies of hot experts in
            each layer of a rank, where there are copies, 2 for `auto`.
        expert_cluster: kind of nodes of expert ranks, if it is another one; by default the cluster.
        gpus: most GPUs of a deployment; a larger rollout has several.
        token_ms: most milliseconds per output token.
        context: tokens in a sequence's KV cache, the mean; by default the trace's.
        micro_batches: numbers of micro-batches on separate ranks, 2 to 4.
        gpu_hour: price of an hour of one GPU; by default no money.
        expert_gpu_hour: price of an hour of one GPU of the expert cluster; by default no money.

    Raises:
        InputError: one line, if an argument is out of range, or no deployment fits memory or the time per token.
    """
    given: dict[str, Any] = {"gpus": gpus, "token_ms": token_ms, "context": context, "expert_cluster": expert_cluster}
    given |= {"gpu_hour": gpu_hour, "expert_gpu_hour": expert_gpu_hour}
    checked(size_rollout, given)
    cluster, step = run.cluster, run.step
    copied: Any = AUTO_SLOTS[0] if run.slots == AUTO else positive.check("slots", run.slots)
    numbers_of = list(micro_batches)
    if not {*numbers_of} <= {*MICRO_BATCHES} or not numbers_of:
        raise InputError(f"micro_batches: {numbers_of} should be of {', '.join(map(str, MICRO_BATCHES))}")
    if 0 in (gpu_hour, expert_gpu_hour):
        raise InputError("gpu_hour and expert_gpu_hour should be above 0")
    if expert_gpu_hour is not None and (gpu_hour is None or expert_cluster is None):
        raise InputError("expert_gpu_hour: needs gpu_hour and expert_cluster")
    if gpu_hour is not None and expert_cluster is not None and expert_gpu_hour is None:
        raise InputError("gpu_hour: with an expert_cluster it needs expert_gpu_hour, too")
    reader = open_trace(trace)
    spec = run.model_of(reader)
    if not reader.facts.lengths.any():
        raise InputError(f"{reader.name}: the trace is empty; there is nothing to decode")
    decoded, earlier = step_of(reader.read(), step)
    tokens = float(_mean_context(decoded) if context is None else context)
    costs = [DecodeCosts(load_node(name or cluster), spec, tokens) for name in (cluster, expert_cluster)]
    times = ExpertTimes(decoded, earlier[-1] if earlier else decoded, min(MOST_TOKENS, gpus * SEQUENCES[-1]))
    prices = None if gpu_hour is None else (gpu_hour, gpu_hour if expert_gpu_hour is None else expert_gpu_hour)
    search = Search(times, costs[0], costs[1], gpus, token_ms / 1e3, copied, tuple(numbers_of), prices)
    deployments, fastest = [], []
    for colocated in (True, False):
        for copies in (False, True):
            kinds_of = search.kinds if colocated else (search,)
            found = [each.find(colocated=colocated, copies=copies) for each in kinds_of]
            fastest += [each for _, each in found if each is not None]
            within = [each for each, _ in found if each is not None]
            deployments += [max(within, key=lambda each: each.worth)] if within else []
    if not fastest:
        raise InputError(
            f"{spec.name} has {bytes_text(spec.parameters * spec.weight_bytes)} of weights; no deployment of at most "
            f"{gpus} GPUs has memory for them and a KV cache of {tokens:,.0f} tokens a sequence; give more --gpus"
        )
    if not deployments:
        least = min(fastest, key=lambda each: each.token_s)
        raise InputError(
            f"--token-ms {token_ms}: no deployment of at most {gpus} GPUs is as fast; the fastest takes "
            f"{seconds(least.token_s)} per token"
        )
    return RolloutSizing(reader.name, tuple(deployments), search)


def _mean_context(trace: RoutingTrace) -> float:
    """Tokens before a response's token, the mean of all; of sequences without a response, all tokens count."""
    lengths = np.diff(trace.sequence_starts).astype(float)
    prompts = np.where(trace.prompt_lengths < lengths, trace.prompt_lengths, 0)
    return max(1.0, float((lengths * (lengths + 1) - prompts * (prompts + 1)).sum() / 2 / (lengths - prompts).sum()))
