"""Step time of live policies on the ranks of a process group, against live routing without balancing.

A step is one micro-step of a small model: forward, backward, complete gradients. Before each, outside of the clock, all
variants run forwards of another micro-step with the same skew, which is the past of `predict`: two, since transfers for
the first of them started with the skew of the round before. The router's choice is replaced by given ids in all
variants. Those of `foresight` are also recorded, and planned outside of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.benchmarks.live_settings import LiveBenchmark
from trimtab.benchmarks.megatron_summary import summarise_pairs
from trimtab.calibration.alternating_rounds import alternate
from trimtab.calibration.small_model import small_config
from trimtab.integrations.transformers import distribute_experts, moe_blocks
from trimtab.integrations.transformers.families import reroute
from trimtab.runtime import Session
from trimtab.runtime.live.balancer import CANDIDATES
from trimtab.runtime.live.policies import LivePolicy
from trimtab.runtime.live.trials import TRIED
from trimtab.runtime.session_settings import Mode
from trimtab.runtime.step_planner import LOCAL_CPU

POLICIES: tuple[LivePolicy, ...] = ("quota", "feplb", "predict", "auto")
FORESIGHT = "foresight"
# With even routing, too.
ON_EVEN = ("off", "quota", "predict", "auto")
# The default policy of a session.
HEADLINE = "auto"
# Its session on even routing: it chooses by times that it has measured.
AUTO_EVEN = "auto, even"
FORWARDS_BEFORE = 2
# Operations that launch no work.
VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "detach", "alias", "slice", "select", "split", "split_with_sizes",
    "unsqueeze", "squeeze", "expand", "as_strided", "_reshape_alias", "empty", "new_empty", "empty_like",
    "empty_strided", "lift_fresh", "view_as", "chunk", "permute", "unbind", "narrow",
}  # fmt: skip


def step_figures(settings: LiveBenchmark) -> dict[str, Any]:
    """Times of all variants, the part of the gain that each policy captures, and what it counts. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    routings = {
        seed: [torch.from_numpy(ids.astype(np.int64)) for ids in settings.routing(ranks, rank, seed)]
        for seed in (None, *range(settings.num_routings))
    }
    models: dict[str, LiveModel] = {policy: LiveModel.of(settings, "live", policy) for policy in ("off", *POLICIES)}
    models[AUTO_EVEN] = LiveModel.of(settings, "live", "auto")
    models[FORESIGHT] = LiveModel.of(settings, "plan", "off")
    seeds = list(range(settings.num_routings))
    # Each variant goes through the seeds; even routing has one.
    turns = {name: cycle(seeds) for name in (*POLICIES, "off", FORESIGHT)}

    def timed(name: str, model: LiveModel, *, even: bool) -> float:
        model.prepare(routings[None if even else next(turns[name])])
        dist.barrier()
        start = time.perf_counter()
        model.step()
        dist.barrier()
        return time.perf_counter() - start

    # `auto` has then tried all policies.
    for number in range(-(-len(CANDIDATES) * TRIED // FORWARDS_BEFORE)):
        for name, seed in (("auto", seeds[number % len(seeds)]), (AUTO_EVEN, None)):
            models[name].prepare(routings[seed])
            models[name].step()
    variants: dict[str, Callable[[], float]] = {}
    for name in ("off", *POLICIES, FORESIGHT):
        variants[f"{name}, skewed"] = partial(timed, name, models[name], even=False)
        if name in ON_EVEN:
            model = models[AUTO_EVEN if name == "auto" else name]
            variants[f"{name}, even"] = partial(timed, name, model, even=True)
    progress = "" if rank else "bench live: steps"
    step_s = alternate(variants, settings.pairs, warm_up=len(seeds), progress=progress)
    counted = {name: models[name].counted(routings[0]) for name in ("off", *POLICIES, FORESIGHT)}
    for model in models.values():
        model.session.close()
    return summarise_live(step_s, settings.num_routings) | {"counted": counted}


def summarise_live(step_s: Mapping[str, list[float]], seeds: int) -> dict[str, Any]:
    """Figures of every policy; those of the default policy are also `gain_captured` and `overhead_when_even`.

    Args:
        step_s: seconds by `policy, skewed` and `policy, even`, one per round, of rounds with the seeds 0, 1, ... in
            turn. Without the second, the overhead is None.
    """
    policies = {}
    names = [name.removesuffix(", skewed") for name in step_s if name.endswith(", skewed") and name != "off, skewed"]
    for name in names:
        even = step_s.get(f"{name}, even")
        pairs = {
            "plain_balanced": step_s["off, even"],
            "planned_balanced": step_s["off, even"] if even is None else even,
            "plain_skewed": step_s["off, skewed"],
            "planned_skewed": step_s[f"{name}, skewed"],
        }
        found = summarise_pairs(pairs, [{}] * seeds)
        policies[name] = {
            "gain_captured": found["gain_captured"],
            "gain_captured_interval": found["gain_captured_interval"],
            "overhead_when_even": None if even is None else found["overhead_when_balanced"],
            "overhead_when_even_interval": None if even is None else found["overhead_when_balanced_interval"],
            "gain_captured_by_seed": [seed["gain_captured"] for seed in found["seeds"]],
        }
    return {
        "gain_captured": policies[HEADLINE]["gain_captured"],
        "overhead_when_even": policies[HEADLINE]["overhead_when_even"],
        "policies": policies,
        "variants": {
            name: {"median_s": float(np.median(seconds)), "step_s": seconds} for name, seconds in step_s.items()
        },
    }


@dataclass(eq=False)
class LiveModel:
    """A model whose experts are in a session.

    Attributes:
        session: of this model alone, so that policies keep what they have learned.
        model: the model.
        replicated: its parameters that every rank has.
        tokens: `[sequences, length]` of both micro-steps.
        chosen: the ids `[n, L, K]` in place of the routers' choice, of the running micro-step.
    """

    session: Session
    model: Any
    replicated: list[nn.Parameter]
    tokens: torch.Tensor
    chosen: list[torch.Tensor]

    @classmethod
    def of(cls, settings: LiveBenchmark, mode: Mode, policy: LivePolicy) -> LiveModel:
        """A model with the same weights for all variants. Collective."""
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            **small_config(
                layers=settings.layers, hidden=settings.hidden, width=settings.width, experts=settings.step_experts,
                top_k=settings.top_k,
            )
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        session = Session(
            num_experts=settings.step_experts,
            mode=mode,
            policy=policy,
            slots_per_rank=settings.slots,
            rates=LOCAL_CPU,
        )
        chosen: list[torch.Tensor] = []
        for layer, block in enumerate(moe_blocks(model).values()):
            # Before the session's own hook, which then gets these ids as the router's choice.
            gate: Any = block.gate
            gate.register_forward_hook(partial(_choose, config, chosen, layer))
        distribute_experts(model, session)
        shape = settings.tokens // settings.sequence_length, settings.sequence_length
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
        return cls(session, model, session.replicated_parameters(model), tokens, chosen)

    def prepare(self, routing: list[torch.Tensor]) -> None:
        """Plan, if the mode does, clear gradients, and run forwards of the first micro-step. Collective."""
        self.model.zero_grad()
        if self.session.mode == "plan":
            self.session.plan_micro_steps([ids.numpy() for ids in routing])
            _ = self.session.step_plan
        self.chosen[:] = [routing[0]]
        for _ in range(FORWARDS_BEFORE):
            with torch.no_grad(), self._micro_step(0):
                self.model(input_ids=self.tokens, use_cache=False)
        self.chosen[:] = [routing[1]]

    def step(self) -> None:
        """Forward, backward and complete gradients of the second micro-step. Collective."""
        with self._micro_step(1):
            logits = self.model(input_ids=self.tokens, use_cache=False).logits
            nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten()).backward()
        self.session.finish_gradients(self.replicated)

    def counted(self, routing: list[torch.Tensor]) -> dict[str, float]:
        """Of a step: `operations` of PyTorch on this rank and `exchanges` of the session, each for a layer; replicas.

        Exchanges are collectives of rows and counts, and returns of replica gradients; transfers of weights are not in
        them. Collective.
        """
        self.prepare(routing)
        self.session.take_metrics()
        layers, logged = len(self.session.layers), self.session._lockstep.count
        with CountedOperations() as operations:
            self.step()
        metrics = self.session.take_metrics()
        return {
            "operations": operations.count / layers,
            "exchanges": (self.session._lockstep.count - logged) / layers,
            "weight_bytes": (metrics["transfer/peer_bytes"] + metrics["transfer/host_bytes"]) / layers,
            "gradient_bytes": metrics["transfer/gradient_bytes"] / layers,
        }

    def _micro_step(self, index: int) -> Any:
        return self.session.micro_step(index) if self.session.mode == "plan" else self.session.live_micro_step()


class CountedOperations(TorchDispatchMode):
    """Counts operations of this thread that launch work.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.split("::")[1] not in VIEWS
        return func(*args, **(kwargs or {}))


def _choose(
    config: Any, chosen: list[torch.Tensor], layer: int, _gate: nn.Module, _args: Any, output: Any
) -> tuple[torch.Tensor, ...]:
    return reroute(config, output, chosen[0][:, layer].clone())
