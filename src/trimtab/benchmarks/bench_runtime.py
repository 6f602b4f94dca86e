"""`trimtab bench runtime`: what balancing gains in a real step, and what the runtime itself costs.

A step is one micro-step of the update: forward, backward, gradients complete on every rank. Planning happens before it,
as in training. The variants take turns within one run, in an order that rotates.

* `static`, `trimtab`: skewed routing, without and with replicas;
* `node-blind`, with several nodes: as `trimtab`, planned as if all ranks were on one;
* `balanced`: the same amount of routing, perfectly even, planned by trimtab (which finds nothing to move);
* `native`: the even routing through transformers' `AllToAllEP` on the same model, experts local as in ours.

After that, `trimtab` runs with every way that replicas' weights can take, to see how much of the transfers is exposed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.expert_parallel import AllToAllEP

from trimtab.calibration.small_model import EXPERTS, HIDDEN, LAYERS, SEQUENCE_LENGTH, TOKENS, TOP_K, WIDTH, small_config
from trimtab.files import STDOUT, write_json
from trimtab.integrations.transformers import moe_blocks, share_experts
from trimtab.integrations.transformers.families import reroute
from trimtab.planner import Schedule, Workload, pack_by_length
from trimtab.planner.plan.workload import max_over_mean
from trimtab.runtime import Session
from trimtab.runtime.gradients import sum_gradients
from trimtab.runtime.planning import LOCAL_CPU, Mode, Paths, SessionPlanner
from trimtab.trace import RoutingTrace, synthesize

WARM_UP_ROUNDS = 3
MOE_ROUNDS = 5
PATHS: tuple[Paths, ...] = ("both", "peer", "host")
PATH_ROUNDS = 10
PATH_FIGURES = ("exposed_s", "refresh_s", "cpu_s", "peer_bytes", "host_bytes", "gradient_bytes")
BOOTSTRAP_SAMPLES = 2000


@dataclass(frozen=True)
class RuntimeBenchmark:
    """Sizes of the benchmark.

    Attributes:
        tokens: of a rank.
        rounds: timed repetitions of every variant.
        json: where to write the figures, if anywhere; `STDOUT` prints no tables.
        ranks_per_node: neighbouring ranks that share a node.
        link_mbit: of the links between nodes, if they are limited; only for the record.
        zipf: exponent of the skewed routing.
        seed: of weights and routing; with two ranks this one gives every layer a static max/mean of 1.3 to 1.6.
        plans: folder for the plan of every variant of ours as it runs, if anywhere; then no tables are printed.
    """

    tokens: int = TOKENS
    rounds: int = 40
    json: Path | None = None
    ranks_per_node: int = 2
    link_mbit: int | None = None
    layers: int = LAYERS
    experts: int = EXPERTS
    top_k: int = TOP_K
    hidden: int = HIDDEN
    width: int = WIDTH
    slots: int = 2
    sequence_length: int = SEQUENCE_LENGTH
    zipf: float = 1.2
    seed: int = 1430
    plans: Path | None = None

    @property
    def model_config(self) -> dict[str, Any]:
        """Of the model, as a `config.json` would have it."""
        return small_config(
            layers=self.layers, hidden=self.hidden, width=self.width, experts=self.experts, top_k=self.top_k
        )

    def draw(self, ranks: int) -> tuple[RoutingTrace, RoutingTrace, Schedule]:
        """Skewed and even routing of one micro-step on so many ranks, and which rank has which sequence of either."""
        shape = {
            "num_sequences": self.tokens // self.sequence_length * ranks,
            "sequence_length": self.sequence_length,
            "num_layers": self.layers,
            "num_experts": self.experts,
            "top_k": self.top_k,
        }
        skewed = synthesize(**shape, zipf=self.zipf, seed=self.seed)
        even = synthesize(**shape, zipf=0.0, seed=self.seed)
        return skewed, even, pack_by_length(skewed.sequence_lengths, num_ranks=ranks, token_budget=self.tokens)


@dataclass(eq=False)
class _Variant:
    """One thing to time. `prepare` is not timed."""

    name: str
    prepare: Callable[[], None]
    step: Callable[[], None]
    blocks: list[nn.Module]
    step_s: list[float] = field(default_factory=list)
    moe_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def run_benchmark(settings: RuntimeBenchmark) -> None:
    """Time all variants on this rank's share of the work; rank 0 prints and writes the figures."""
    rank = dist.get_rank()
    session, variants, by_paths, static_ratios = _build(settings)
    rounds = range(settings.rounds + WARM_UP_ROUNDS)
    for number in track(rounds, "bench runtime", disable=rank != 0):
        for place in range(len(variants)):
            variant = variants[(number + place) % len(variants)]
            variant.prepare()
            if number == 0 and rank == 0 and settings.plans is not None and variant.name != "native":
                session.step_plan.save(settings.plans / f"{variant.name}.npz")
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            variant.step()
            dist.barrier()
            if number >= WARM_UP_ROUNDS:
                variant.step_s.append(time.perf_counter() - start)
                variant.cpu_s.append(time.process_time() - cpu_start)
    for variant in variants:
        with _MoeTimer(variant.blocks) as timer:
            for _ in range(min(MOE_ROUNDS, settings.rounds)):
                variant.prepare()
                timer.seconds = 0.0
                variant.step()
                variant.moe_s.append(timer.seconds)
    ways = _measure_paths(settings, session, by_paths)
    cpu_s = torch.tensor([statistics.mean(variant.cpu_s) for variant in variants], dtype=torch.float64)
    dist.all_reduce(cpu_s)
    if rank == 0:
        _report(settings, variants, (cpu_s / dist.get_world_size()).tolist(), static_ratios, ways)


def _measure_paths(settings: RuntimeBenchmark, session: Session, by_paths: list[_Variant]) -> dict[str, Any]:
    """What transfers cost on each path and on both: medians over rounds of means over ranks, variants taking turns."""
    figures: dict[str, list[list[float]]] = {variant.name: [] for variant in by_paths}
    for number in range(min(PATH_ROUNDS, settings.rounds) + 1):
        for variant in by_paths:
            with _MoeTimer(variant.blocks) as timer:
                variant.prepare()
                session.take_metrics()
                variant.step()
            taken = session.take_metrics()
            sums = torch.tensor([timer.seconds, *(taken[f"transfer/{name}"] for name in PATH_FIGURES)])
            dist.all_reduce(sums)
            if number:  # the first one warms up
                figures[variant.name].append((sums / dist.get_world_size()).tolist())
    ways: dict[str, Any] = {}
    for name, rounds in figures.items():
        moe_s, *others = (statistics.median(values) for values in zip(*rounds, strict=True))
        ways[name] = {"moe_s": moe_s} | dict(zip(PATH_FIGURES, others, strict=True))
        fractions = [exposed / moe for moe, exposed, *_ in rounds]
        ways[name]["exposed_fraction"], ways[name]["exposed_fraction_interval"] = ratio_with_interval(fractions)
    return ways


def _build(settings: RuntimeBenchmark) -> tuple[Session, list[_Variant], list[_Variant], list[float]]:
    """The session, all variants, `trimtab` with every path, and the static max/mean of each layer."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(settings.seed)
    torch.set_flush_denormal(True)
    config = AutoConfig.for_model(**settings.model_config)
    whole: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ours: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ours.load_state_dict(whole.state_dict())
    per_node = settings.ranks_per_node
    rates = LOCAL_CPU
    if settings.link_mbit is not None:
        rates = replace(rates, network_bytes_per_s=settings.link_mbit * 1e6 / 8)
    session = Session(num_experts=settings.experts, slots_per_rank=settings.slots, ranks_per_node=per_node, rates=rates)
    share_experts(ours, session)
    replicated = session.replicated_parameters(ours)
    skewed, even, schedule = settings.draw(num_ranks)
    mine = schedule.sequences_of(rank)
    native = whole
    even_ids = even.select(mine).expert_ids.transpose(1, 0, 2).astype(np.int64)
    _use_native_experts(native, session, torch.from_numpy(even_ids))
    native_experts = {id(p) for block in moe_blocks(native).values() for p in block.experts.parameters()}
    native_replicated = [p for p in native.parameters() if id(p) not in native_experts]
    tokens = torch.randint(0, config.vocab_size, (len(mine), settings.sequence_length + 1))

    def loss(model: Any) -> torch.Tensor:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        total = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return total / (settings.tokens * num_ranks)

    def prepare_ours(trace: RoutingTrace, mode: Mode, paths: Paths = "both") -> None:
        ours.zero_grad()
        session.mode, session.paths = mode, paths
        session.plan(trace.select(mine), schedule)

    def step_ours() -> None:
        with session.micro_step(0):
            loss(ours).backward()
        session.finish_gradients(replicated)

    def step_native() -> None:
        loss(native).backward()
        sum_gradients(native_replicated, session.topology.data)

    our_blocks, native_blocks = list(moe_blocks(ours).values()), list(moe_blocks(native).values())

    def prepare_blind() -> None:
        ours.zero_grad()
        session.mode, session.paths = "plan", "both"
        one_node = replace(session.topology, ranks_per_node=num_ranks)
        planner = SessionPlanner.of(
            one_node, session.homes, top_k=settings.top_k, slots=settings.slots, least_gain=session.settings.least_gain
        )
        mine_only = skewed.select(mine)
        planned = planner.for_schedule(mine_only, schedule, session.placement, "plan", may_move=False)
        session.apply_plan(replace(planned, plan=replace(planned.plan, ranks_per_node=per_node)), mine_only)

    home_loads = Workload.from_trace(skewed, schedule).home_loads(session.placement.home)
    variants = [
        _Variant("static", partial(prepare_ours, skewed, "static"), step_ours, our_blocks),
        _Variant("trimtab", partial(prepare_ours, skewed, "plan"), step_ours, our_blocks),
        _Variant("balanced", partial(prepare_ours, even, "plan"), step_ours, our_blocks),
        _Variant("native", native.zero_grad, step_native, native_blocks),
        *([_Variant("node-blind", prepare_blind, step_ours, our_blocks)] if per_node != num_ranks else []),
    ]
    by_paths = [_Variant(paths, partial(prepare_ours, skewed, "plan", paths), step_ours, our_blocks) for paths in PATHS]
    return session, variants, by_paths, max_over_mean(home_loads).mean(axis=0).tolist()


def _use_native_experts(model: Any, session: Session, ids_LNK: torch.Tensor) -> None:
    """Run a whole model's experts through transformers' `AllToAllEP`, with this rank's home experts and given routing.

    Args:
        ids_LNK: `[L, n, K]` int64, the experts of this rank's tokens.
    """
    mesh = init_device_mesh("cpu", (session.num_ranks, 1), mesh_dim_names=("ep", "tp"))
    home = torch.from_numpy(session.home_experts)
    for layer, block in enumerate(moe_blocks(model).values()):
        experts: Any = block.experts
        experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach()[home].clone())
        experts.down_proj = nn.Parameter(experts.down_proj.detach()[home].clone())
        # What its own parameter sharding does: only local experts are left.
        experts.num_experts = len(home)
        experts._is_expert_parallel = True
        experts.forward = AllToAllEP(experts, mesh["ep"], mesh["tp"])
        block.gate.register_forward_hook(partial(_give_routing, model.config, ids_LNK[layer]))


def _give_routing(config: Any, ids_NK: torch.Tensor, _gate: nn.Module, _args: Any, output: Any) -> Any:
    return reroute(config, output, ids_NK)


class _MoeTimer:
    """Seconds spent in MoE blocks, forward and backward."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.seconds = 0.0
        self._blocks = blocks
        self._handles: list[Any] = []
        self._start = 0.0

    def __enter__(self) -> _MoeTimer:
        for block in self._blocks:
            self._handles += [
                block.register_forward_pre_hook(self._begin),
                block.register_forward_hook(self._end),
                block.register_full_backward_pre_hook(self._begin),
                block.register_full_backward_hook(self._end),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._start


def ratio_with_interval(values: list[float], seed: int = 0) -> tuple[float, list[float]]:
    """Median of per-round ratios, and its 95% bootstrap interval [low, high]."""
    rng = np.random.default_rng(seed)
    samples = rng.choice(np.asarray(values), (BOOTSTRAP_SAMPLES, len(values)))
    low, high = np.percentile(np.median(samples, axis=1), [2.5, 97.5])
    return statistics.median(values), [float(low), float(high)]


def _report(
    settings: RuntimeBenchmark,
    variants: list[_Variant],
    cpu_s: list[float],
    static_ratios: list[float],
    ways: dict[str, Any],
) -> None:
    step_s = {variant.name: variant.step_s for variant in variants}
    rounds = list(zip(*(step_s[name] for name in ("static", "trimtab", "balanced", "native")), strict=True))
    ratios = {
        "gain_captured": [(static - trimtab) / (static - balanced) for static, trimtab, balanced, _ in rounds],
        "fraction_of_balanced": [balanced / trimtab for _, trimtab, balanced, _ in rounds],
        "overhead_when_balanced": [balanced / native - 1 for _, _, balanced, native in rounds],
    }
    columns = (Column(name, justify="right") for name in ("median step", "of it in MoE", "CPU a rank"))
    table = Table("variant", *columns)
    policies: dict[str, Any] = {}
    for variant, cpu in zip(variants, cpu_s, strict=True):
        policies[variant.name] = {
            "step_s": variant.step_s,
            "median_s": statistics.median(variant.step_s),
            "moe_s": statistics.median(variant.moe_s),
            "cpu_s_per_rank": cpu,
        }
        figures = (policies[variant.name][key] for key in ("median_s", "moe_s", "cpu_s_per_rank"))
        table.add_row(variant.name, *(f"{figure * 1e3:.1f} ms" for figure in figures))
    if "node-blind" in step_s:
        pairs = zip(step_s["node-blind"], step_s["trimtab"], strict=True)
        ratios["speedup_vs_node_blind"] = [blind / trimtab for blind, trimtab in pairs]
    summary: dict[str, Any] = {}
    lines = Table(show_header=False, box=None)
    for name, values in ratios.items():
        summary[name], summary[f"{name}_interval"] = ratio_with_interval(values)
        low, high = summary[f"{name}_interval"]
        lines.add_row(name, f"{summary[name]:.3f}", f"[{low:.3f}, {high:.3f}]")
    transfers = Table("paths", *(Column(name, justify="right") for name in ("exposed", "of MoE time", "peer", "host")))
    for name, figures_of in ways.items():
        low, high = figures_of["exposed_fraction_interval"]
        transfers.add_row(
            name,
            f"{figures_of['exposed_s'] * 1e3:.1f} ms",
            f"{figures_of['exposed_fraction']:.2%} [{low:.2%}, {high:.2%}]",
            f"{figures_of['peer_bytes'] / 1e6:.1f} MB",
            f"{figures_of['host_bytes'] / 1e6:.1f} MB",
        )
    skew = f"{min(static_ratios):.2f} to {max(static_ratios):.2f}"
    console = Console(highlight=False, quiet=settings.json == STDOUT or settings.plans is not None)
    console.print(
        f"One micro-step, {len(rounds)} alternating rounds; static max/mean by layer {skew}",
        table,
        lines,
        transfers,
        sep="\n",
    )
    if settings.json is not None:
        sizes = {key: value for key, value in asdict(settings).items() if key not in ("json", "plans")}
        content = {"schema": "trimtab-bench-runtime-1", "settings": sizes, "ranks": dist.get_world_size()}
        content |= {"threads_per_rank": torch.get_num_threads(), "static_max_over_mean": static_ratios}
        write_json(settings.json, content | {"policies": policies, "transfer": ways} | summary)
