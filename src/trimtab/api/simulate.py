"""`trimtab.simulate`: step time of every balancer on a cluster, for steps of a trace."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from trimtab.api.result_summary import Summarised
from trimtab.api.run import Run, checked
from trimtab.api.steps import read_steps
from trimtab.errors import InputError
from trimtab.figures import plural
from trimtab.kinds import choice, switch
from trimtab.policies import POLICIES
from trimtab.report.html import write_html
from trimtab.report.imbalance import Imbalance, need
from trimtab.report.simulation import answer, assumed, fitting_first, policy_results, simulation_report
from trimtab.simulator.comparison import Outcome, permuted_steps, simulate_policy
from trimtab.simulator.comparison_case import ComparisonCase, trace_hash
from trimtab.simulator.sensitivity import sensitivities
from trimtab.simulator.simulated_case import PERMUTATION_SEED, SimulatedCase
from trimtab.simulator.step import WAITING
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
POLICY_NAMES = choice(*POLICIES, ALL, option="--policy")
Names = str | Sequence[str]
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
    run: Run | Sequence[Run] = Run(),  # noqa: B008
    *,
    policies: Annotated[Names | None, POLICY_NAMES] = None,
    groups_meet: Annotated[str, choice("layer", "step")] = "step",
    equal_terms: Annotated[bool, switch] = False,
    sensitivity: Annotated[bool, switch] = False,
    progress: Callable[[str, int, int], None] = lambda policy, done, total: None,
) -> SimulationResult:
    """Plan steps of a routing trace with several balancers, estimate the step time of every plan with a timeline model
    of the cluster, and say where the time goes and whether memory is enough.

    Balancers keep what they moved and see the loads of the steps before. Figures are means of the steps.

    Args:
        trace: a `RoutingTrace`, a path (file, folder or pattern), or a list of paths.
        run: the run. Several are a sweep: they differ in ranks, slots, micro-steps and dispatcher alone.
        policies: balancers, in a list or as "eplb,trimtab"; all leaves out those whose packages are not installed;
            static and balanced always run; by default static eplb trimtab balanced.
        groups_meet: where groups wait for each other.
        equal_terms: same homes, schedule and slots for all balancers, instead of their own recipes.
        sensitivity: simulate the five best balancers again, with what the price may lack, such as a slower network.
        progress: called before each balancer with its name, the balancers done and all, and once at the end.

    Raises:
        InputError: one line, if an argument is out of range or the trace can't be read, is empty, has no such step, is
            not of the model, or does not fit the ranks, the token budget or the micro-steps.
    """
    names = _names(policies)
    checked(simulate, {"groups_meet": groups_meet, "equal_terms": equal_terms, "sensitivity": sensitivity})
    asked = [run] if isinstance(run, Run) else list(run)
    if not asked:
        raise InputError("run: expected at least one")
    alike = [replace(each, ranks=None, slots=0, micro_steps=None, dispatcher=None) for each in asked]
    if any(each != alike[0] for each in alike):
        raise InputError("run: runs of a sweep differ in ranks, slots, micro_steps and dispatcher alone")
    reader = open_trace(trace)
    runs = [each.on_ranks(reader) for each in asked]
    recorded = read_steps(reader, runs[0])
    model = runs[0].model_of(reader)
    most = max(each.micro_steps or 1 for each in runs)
    fewest = min((part.trace for part in recorded.recorded[-recorded.measured :]), key=lambda part: part.num_sequences)
    if most > fewest.num_sequences and not recorded.is_scaled:
        raise InputError(
            f"--micro-steps {most}: step {fewest.steps[0]} of {reader.name} has "
            f"{plural(fewest.num_sequences, 'sequence')}; every micro-step needs one"
        )
    # What can't exist is refused before anything is simulated.
    for each in runs:
        each.settings(model), each.nodes
    total = len(runs) * (len(names) + 1)
    cases: list[SimulatedCase] = []
    for each in runs:
        case = recorded.case(each, model, meet=groups_meet, equal_terms=equal_terms)
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
        size = (case.cluster.ranks, each.slots, each.micro_steps)
        cases.append(SimulatedCase(*size, case, outcomes, times_s, waiting_s, each.dispatcher, changed))
    progress(names[-1], total, total)
    return SimulationResult(reader.name, recorded.last, tuple(cases))


def _flat(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Single values of nested figures, with dotted names; lists are left out."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            yield f"{prefix}{name}", value


def _names(policies: Names | None) -> list[str]:
    """The balancers to run, in the order of `POLICIES`."""
    given = [policies] if isinstance(policies, str) else MAIN_POLICIES if policies is None else policies
    wanted = [name for text in given for name in text.split(",")]
    for name in wanted:
        POLICY_NAMES.check("policies", name)
        POLICIES.get(name)  # raises InputError if a package that it needs is missing
    return [name for name in POLICIES if name in (*wanted, *NEEDED) or (ALL in wanted and _available(name))]


def _available(name: str) -> bool:
    """Whether a balancer has the packages that it needs; logs a line if not."""
    try:
        return bool(POLICIES[name])
    except InputError as error:
        log.info("left out: %s", error)
        return False
