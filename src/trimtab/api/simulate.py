"""`trimtab.simulate`: step time of every balancer on a cluster, for steps of a trace."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.api.arguments import (
    ModelSource,
    Overrides,
    check_choice,
    check_run,
    layout_of,
    model_of,
    nodes_of,
    numbers,
    ranks_of,
    recomputed,
    split_names,
)
from trimtab.api.result_summary import Summarised
from trimtab.api.steps import read_steps
from trimtab.cluster.parallel_layout import ZERO1
from trimtab.cluster.specs import AUTO, slot_numbers
from trimtab.errors import InputError
from trimtab.figures import plural
from trimtab.policies import POLICIES
from trimtab.report.html import write_html
from trimtab.report.imbalance import Imbalance, need
from trimtab.report.simulation import answer, assumed, fitting_first, policy_results, simulation_report
from trimtab.simulator.comparison import Outcome, permuted_steps, simulate_policy, with_checkpointing
from trimtab.simulator.comparison_case import ComparisonCase, trace_hash
from trimtab.simulator.sensitivity import sensitivities
from trimtab.simulator.simulated_case import PERMUTATION_SEED, SimulatedCase
from trimtab.simulator.step import WAITING, StepSettings
from trimtab.simulator.yardstick import yardstick
from trimtab.trace import RoutingTrace
from trimtab.trace.store import Source, open_trace

log = logging.getLogger("trimtab")
# Simulated by default.
MAIN_POLICIES = ("static", "eplb", "trimtab", "balanced")
# References for speed-up and the ideal: in every run.
NEEDED = ("static", "balanced")
# Stands for the names of all balancers.
ALL = "all"
# Simulated again with permuted expert ids.
PERMUTED_POLICIES = ("static", "eplb", "trimtab", "balanced")


@dataclass(frozen=True, eq=False, repr=False)
class SimulationResult(Summarised):
    """Step times of balancers, in one case or in every case of a sweep.

    Attributes:
        source: name of the trace's file or files.
        trace: the last step's sequences; the schedules of plans refer to them by index.
        cases: one for every combination of ranks, slots, micro-steps and dispatchers. Summary and page are about the
            first that fits the device.
    """

    source: str
    trace: RoutingTrace
    cases: tuple[SimulatedCase, ...]

    @property
    def case(self) -> ComparisonCase:
        """Of the first case."""
        return self.cases[0].case

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """Of the first case, by balancer."""
        return self.cases[0].outcomes

    def figures(self) -> dict[str, Any]:
        """What `trimtab simulate --json` writes.

        trace_hash: of the last step's sequences.
        yardstick: digest of presets, other balancers and planning times; figures with other digests can't be compared.
        seed: of permuted expert ids.
        settings, cluster, model: of the first case.
        policies: figures by balancer, of the first case.
        ids_permuted: step times by balancer if expert ids are in random order.
        sensitivity: step times of the best balancers after each change of the cluster, if asked for.
        sweep: every case, if there are several.
        earlier_steps: RL steps before the last one, which balancers know.
        steps: RL steps that are simulated.
        layers_traced, layers_of_model: MoE layers; seconds and bytes are those of the model.
        micro_steps: as requested; null with a token budget.
        assumed: what was not stated, with the options that change it.
        """
        case = self.case
        content = {
            "schema": "trimtab-simulate-2",
            "trace_hash": trace_hash(self.trace),
            "yardstick": yardstick(),
            # Of permuted expert ids. Nothing else is random, beyond the searches' own fixed seeds.
            "seed": PERMUTATION_SEED,
            "settings": {
                "trace": self.source,
                "step": int(self.trace.steps[0]),
                "earlier_steps": len(case.earlier),
                "steps": case.measured,
                "layers_traced": self.trace.num_layers,
                "layers_of_model": case.model.moe_layers,
                "micro_steps": self.cases[0].micro_steps,
                "token_budget": case.token_budget,
                "mini_batches": case.mini_batches,
                "equal_terms": case.equal_terms,
                "recorded_sequences": case.recorded,
                "assumed": list(case.assumed),
                **asdict(case.settings),
            },
            "cluster": asdict(case.cluster),
            "model": asdict(case.model),
            **self.cases[0].figures(),
        }
        if len(self.cases) > 1:
            content["sweep"] = [
                {
                    "ranks": simulated.ranks,
                    "slots": simulated.slots,
                    "micro_steps": simulated.micro_steps,
                    "dispatch_forwards": simulated.case.cluster.dispatch_forwards,
                    "token_budget": simulated.case.token_budget,
                    **simulated.figures(),
                }
                for simulated in self.cases
            ]
        return content

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page of `trimtab simulate --html`: all cases in a table, then the first that fits. Writes are
        atomic."""
        write_html(simulation_report(self.source, self.trace, self.cases), path, self.figures())

    @property
    def imbalance(self) -> Imbalance:
        """Of the first case, in its last step: `static`, `eplb` if it ran, and the reported balancer."""
        names = [name for name in ("static", "eplb", self.cases[0].reported) if name in self.outcomes]
        loads = {name: self.outcomes[name].simulated.work.loads_MLR for name in names}
        return Imbalance(loads, self.trace.layer_indices, int(self.trace.steps[0]), self.trace.top_k)

    def to_pandas(self) -> Any:
        """A `DataFrame` with a row for each case and balancer: `ranks`, `slots`, `micro_steps`, `dispatcher`,
        `balancer`, and the figures of the JSON that are one number or text; `parts_s.NAME` and `memory_bytes.NAME` are
        parts of the step time and of memory. Needs pandas, as in `pip install '.[plot]'`.
        """
        rows = []
        for simulated in self.cases:
            sent = "tokens" if simulated.case.cluster.dispatch_forwards else "rows"
            size = {"ranks": simulated.ranks, "slots": simulated.slots, "micro_steps": simulated.micro_steps}
            for name, figures in simulated.figures()["policies"].items():
                rows.append({**size, "dispatcher": sent, "balancer": name, **dict(_flat(figures))})
        return need("pandas").DataFrame(rows)

    def summary(self) -> Sequence[str]:
        first = fitting_first(self.cases)[0]
        times = ", ".join(f"{policy.name} {policy.step_time_s:.3f}" for policy in policy_results(first))
        more = len(self.cases) - 1
        return (
            f"{self.source}, step {self.trace.steps[0]}, {first.case.model.name}, {first.text}",
            assumed(self.cases),
            answer(first),
            f"seconds of a step: {times}",
            f"{more} more in cases" if more else "",
        )


def simulate(
    trace: RoutingTrace | Source,
    *,
    policies: str | Sequence[str] | None = None,
    cluster: str | os.PathLike[str] = "h100x8",
    model: ModelSource | None = None,
    overrides: Overrides = (),
    ranks: int | Sequence[int] | None = None,
    ranks_per_node: int | None = None,
    slots: int | str | Sequence[int | str] = AUTO,
    micro_steps: int | Sequence[int] | None = None,
    token_budget: int | None = None,
    dispatcher: str | Sequence[str] | None = None,
    mini_batches: int = 1,
    groups: int = 1,
    groups_meet: str = "step",
    equal_terms: bool = False,
    recompute: bool = True,
    sharding: str = ZERO1,
    checkpointing: bool | str | None = None,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    step: int | None = None,
    steps: int | None = None,
    step_tokens: int | str | None = None,
    sampled: float | None = None,
    sensitivity: bool = False,
    progress: Callable[[str, int, int], None] = lambda policy, done, total: None,
) -> SimulationResult:
    """Plan steps of a trace with several balancers and simulate them, as `trimtab simulate` does.

    Balancers keep what they moved and see the loads of the steps before. Figures are means of the steps.

    Args:
        trace: a `RoutingTrace`, a path (file, folder or pattern), or a list of paths.
        policies: names of `trimtab.policies.POLICIES`, in a list or as "eplb,trimtab", or "all", which leaves out, with
            a note, those whose packages are not installed; `static` and `balanced` always run. By default also `eplb`
            and `trimtab`.
        cluster: kind of nodes: a preset's name or a TOML file.
        model: a `ModelSpec`, a preset's name or hub id, a config.json or a checkpoint; by default the model that the
            trace names, else a preset like the trace.
        overrides: keys of the model's config with other values, such as `{"num_hidden_layers": 24}`.
        ranks: ranks of a group; several for a sweep. By default 16, or the largest power of two below that divides the
            experts.
        ranks_per_node: ranks of a node; by default the cluster's.
        slots: replica slots per rank; "auto": of 2, 4, 8 and 16 each balancer has the best that fits; several for a
            sweep.
        micro_steps: micro-steps of the step, instead of a token budget; several for a sweep.
        token_budget: most tokens of a rank in a micro-step; by default 8192, or the longest sequence if that is more.
        dispatcher: what is sent to a node, `rows` (every row to its rank, as all-to-alls do) or `tokens` (a token once,
            as DeepEP, HybridEP and MoRI do); several for a sweep. By default the cluster's.
        mini_batches: optimizer steps.
        groups: expert-parallel groups.
        groups_meet: where groups synchronise, `layer` or `step`.
        equal_terms: same homes, schedule and slots for all balancers, instead of their own recipes.
        recompute: False simulates the update alone, with the rollout's log-probabilities.
        sharding: training state that data ranks share out, for memory: `ddp`, `zero1` (optimizer state) or `fsdp`.
        checkpointing: activations that are computed again for backward: `none` or False, `selective` (cheap ones),
            `full` or True: least memory, and another forward of every micro-step. By default the least of these with
            which `static` fits.
        tp, pp, cp: tensor, pipeline (1F1B) and context parallelism, see `Layout`; `ranks * groups * pp` GPUs in all.
        step: the last RL step to simulate; by default that of the trace.
        steps: steps to simulate, up to that one; by default all but the trace's first, at most 6.
        step_tokens: tokens of a whole step, such as 20_000_000 or "20M", in all groups, if the trace has a part of
            each: its prompts are then drawn with all their answers until steps have so many. By default steps have one
            full micro-step of every rank at least, unless micro-steps are given.
        sampled: the part of each step that the trace has, above 0 to 1, instead; by default what the trace says.
        sensitivity: whether the five best balancers are simulated again under changes of the cluster, such as a slower
            network or none from host memory.
        progress: called before each balancer with its name, the balancers done and all, and once at the end.

    Raises:
        InputError: one line, if an argument is out of range or the trace can't be read, is empty, has no such step, is
            not of the model, or does not fit the ranks, the token budget or the micro-steps.
    """
    arguments, reader = locals(), open_trace(trace)
    sizes: Sequence[int | None] = [None] if micro_steps is None else numbers(micro_steps)
    sent: Sequence[str | None] = [None] if dispatcher is None else split_names(dispatcher)
    several = (
        numbers(ranks_of(reader.empty, reader.name, None) if ranks is None else ranks),
        numbers(slots),
        sizes,
        sent,
    )
    every, clusters = list(itertools.product(*several)), []
    names = _names(policies)
    if not every:
        raise InputError("ranks, slots, micro_steps and dispatcher: expected at least one value each")
    for values in every:
        check_run(arguments | dict(zip(("ranks", "slots", "micro_steps", "dispatcher"), values, strict=True)))
        ranks_of(reader.empty, reader.name, values[0])
        clusters.append(nodes_of(cluster, values[0], values[1], ranks_per_node, values[3]))

    recorded = read_steps(reader, step=step, steps=steps, step_tokens=step_tokens, sampled=sampled)
    step_trace = recorded.last
    spec = model_of(reader.name, step_trace, model, overrides)
    layout = layout_of(spec, several[0], groups=groups, tp=tp, pp=pp, cp=cp)
    most = max(numbers(micro_steps or 1))
    fewest = min((part.trace for part in recorded.recorded[-recorded.measured :]), key=lambda part: part.num_sequences)
    if most > fewest.num_sequences and not recorded.is_scaled:
        raise InputError(
            f"--micro-steps {most}: step {fewest.steps[0]} of {reader.name} has "
            f"{plural(fewest.num_sequences, 'sequence')}; every micro-step needs one"
        )
    total = len(every) * (len(names) + 1)
    cases: list[SimulatedCase] = []
    settings = StepSettings(
        groups=groups, meet=groups_meet, recompute=recompute, sharding=sharding,
        checkpointing=recomputed(checkpointing), layout=layout,
    )  # fmt: skip
    for (case_ranks, case_slots, size, sends), nodes in zip(every, clusters, strict=True):
        case = recorded.case(
            nodes, spec, settings, micro_steps=size, token_budget=token_budget, mini_batches=mini_batches,
            equal_terms=equal_terms,
        ).with_slots(*slot_numbers(case_slots))  # fmt: skip
        if checkpointing is None:
            case = with_checkpointing(case)
        outcomes: dict[str, Outcome] = {}
        done = len(cases) * (len(names) + 1)
        for policy in names:
            progress(policy, done + len(outcomes), total)
            outcomes[policy] = simulate_policy(case, policy)
        progress("permuted expert ids", done + len(names), total)
        permuted = permuted_steps(case, {n: outcomes[n] for n in PERMUTED_POLICIES if n in names}, PERMUTATION_SEED)
        times_s = {name: step.step_time_s for name, step in permuted.items()}
        waiting_s = permuted["static"].causes_s[WAITING]
        if sensitivity:
            progress("sensitivity", done + len(names), total)
        changed = sensitivities(case, outcomes) if sensitivity else ()
        cases.append(SimulatedCase(case_ranks, case_slots, size, case, outcomes, times_s, waiting_s, sends, changed))
    progress(names[-1], total, total)
    return SimulationResult(reader.name, step_trace, tuple(cases))


def _flat(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Single values of nested figures, with dotted names; lists are left out."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            yield f"{prefix}{name}", value


def _names(policies: str | Sequence[str] | None) -> list[str]:
    """The balancers to run, in the order of `POLICIES`."""
    wanted = MAIN_POLICIES if policies is None else split_names(policies)
    for name in wanted:
        check_choice("policies", name, (*POLICIES, ALL))
        POLICIES.get(name)  # raises InputError if a package that it needs is missing
    return [name for name in POLICIES if name in (*wanted, *NEEDED) or (ALL in wanted and _available(name))]


def _available(name: str) -> bool:
    """Whether a balancer has the packages that it needs; logs a line if not."""
    try:
        return bool(POLICIES[name])
    except InputError as error:
        log.info("left out: %s", error)
        return False
