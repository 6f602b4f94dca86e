"""`Run`: cluster, model, layout and steps of a training run, as all functions and commands take them."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Annotated, Any, get_type_hints

from trimtab.api import run_kinds
from trimtab.api.model_choice import ModelSource, Overrides, model_of, model_or_none
from trimtab.api.run_kinds import DISPATCHERS
from trimtab.cluster import ClusterSpec, Layout, ModelSpec, load_cluster
from trimtab.cluster.parallel_layout import GRANULARITIES, ZERO1
from trimtab.cluster.specs import AUTO, slot_numbers
from trimtab.errors import InputError
from trimtab.kinds import Kind, part, positive, switch, tokens, whole
from trimtab.simulator.step import StepSettings
from trimtab.trace import TraceReader

# One gives what the other would.
EXCLUSIVE = (("micro_steps", "token_budget"), ("step_tokens", "sampled"))


@dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """A training run: its cluster, model, layout, and the size of its steps.

    One run serves `analyze`, `advise`, `plan`, `simulate`, `renumber_checkpoint` and `size_rollout`. A function looks
    at the fields that it has a use for; its command has these as options. Fields are checked when a run is made.

    Attributes:
        cluster: kind of nodes, a preset or a TOML file.
        model: a preset, its hub id, a config.json, a checkpoint folder or a `ModelSpec`; by default the trace's, else a
            preset like the trace.
        overrides: other values of keys of the model's config, such as num_hidden_layers=24; by default none.
        ranks: ranks of the expert-parallel group; by default 16, or the largest power of two below that divides the
            experts.
        ranks_per_node: ranks of a node; by default the cluster's.
        groups: expert-parallel groups.
        tp: tensor parallelism of the dense parts.
        pp: pipeline stages (1F1B), each of all groups; a run has `ranks * groups * pp` GPUs.
        cp: context parallelism.
        micro_steps: micro-steps of a step, instead of a token budget; by default as the token budget gives.
        token_budget: most tokens of a rank in a micro-step; by default 8192, or the longest sequence if that is more.
        mini_batches: optimizer steps in an RL step.
        slots: slots of a rank, the replicas that it has memory for in every layer; `auto`: each balancer has the fewest
            of 2, 4, 8, 16 that are about as fast as any.
        dispatcher: what is sent to a node: every row, as all-to-alls do, or a token once, as DeepEP, HybridEP and MoRI
            do; by default the cluster's.
        recompute: False: update alone, with the rollout's log-probabilities.
        sharding: training state that data ranks share out: none, optimizer state, or all, as FSDP does.
        recompute_granularity: activations that are computed again for backward; by default the fewest with which plain
            expert parallelism fits, in `plan` none.
        step: the last RL step that is looked at; by default the last of the trace; `analyze` counts all.
        steps: RL steps that are simulated; by default all but the trace's first, at most 6, or 2 in `advise`.
        step_tokens: tokens of a whole step, in all groups, such as 20M, if the trace has a part of it: its prompts are
            then drawn with all their answers until steps have so many; by default the trace's.
        sampled: the part of each step's sequences that was recorded, instead; by default the trace's.

    Raises:
        InputError: one line, if a field is out of range, or two of them exclude each other.
    """

    cluster: Annotated[str | os.PathLike[str], run_kinds.cluster] = "h100x8"
    model: Annotated[ModelSource | None, run_kinds.model] = None
    overrides: Annotated[Overrides, run_kinds.config_value] = ()
    ranks: Annotated[int | None, positive] = None
    ranks_per_node: Annotated[int | None, positive] = None
    groups: Annotated[int, positive] = 1
    tp: Annotated[int, positive] = 1
    pp: Annotated[int, positive] = 1
    cp: Annotated[int, positive] = 1
    micro_steps: Annotated[int | None, positive] = None
    token_budget: Annotated[int | None, positive] = None
    mini_batches: Annotated[int, positive] = 1
    slots: Annotated[int | str, run_kinds.slots] = AUTO
    dispatcher: Annotated[str | None, run_kinds.dispatcher] = None
    recompute: Annotated[bool, switch] = True
    sharding: Annotated[str, run_kinds.sharding] = ZERO1
    recompute_granularity: Annotated[str | None, run_kinds.granularity] = None
    step: Annotated[int | None, whole] = None
    steps: Annotated[int | None, positive] = None
    step_tokens: Annotated[int | str | None, tokens] = None
    sampled: Annotated[float | None, part] = None

    def __post_init__(self) -> None:
        for name, value in checked(Run, {field.name: getattr(self, field.name) for field in fields(self)}).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "overrides", tuple(dict(self.overrides).items()))
        for first, second in EXCLUSIVE:
            # Each fixes the other.
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise InputError(f"{first}: not allowed with argument {second}")

    def __repr__(self) -> str:
        """With the fields that are not by default."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = [f"{name}={value!r}" for name, value in values.items() if value != getattr(Run, name)]
        return f"Run({', '.join(changed)})"

    def sweep(self, **values: Iterable[Any]) -> tuple[Run, ...]:
        """Runs with every combination of values of some fields, such as `run.sweep(ranks=[8, 16], slots=[2, 4])`."""
        return tuple(
            replace(self, **dict(zip(values, each, strict=True))) for each in itertools.product(*values.values())
        )

    def on_ranks(self, reader: TraceReader) -> Run:
        """The run with a number of ranks: the largest power of two up to 16 that divides the experts, if none is given.

        Raises:
            InputError: if the given ranks don't divide them.
        """
        experts = reader.empty.num_experts
        if self.ranks is None:
            return replace(self, ranks=math.gcd(experts, 16))
        if experts % self.ranks:
            divisors = ", ".join(str(each) for each in range(1, experts + 1) if experts % each == 0)
            raise InputError(
                f"--ranks {self.ranks} doesn't divide the {experts} experts of {reader.name}; use one of {divisors}"
            )
        return self

    @property
    def nodes(self) -> ClusterSpec:
        """The cluster of the ranks, which are given; of several numbers of slots with the fewest."""
        fewest = slot_numbers(self.slots)[0]
        nodes = load_cluster(
            self.cluster, ranks=self.ranks or 0, slots_per_rank=fewest, ranks_per_node=self.ranks_per_node
        )
        return nodes if self.dispatcher is None else replace(nodes, dispatch_forwards=DISPATCHERS[self.dispatcher])

    def model_of(self, reader: TraceReader) -> ModelSpec:
        """The model; InputError if the trace can't be of it, or there is no preset like the trace."""
        return model_of(reader.name, reader.empty, self.model, self.overrides)

    def model_or_none(self, reader: TraceReader) -> ModelSpec | None:
        """The model as `model_of`; None if none is given or named, and there is no preset like the trace."""
        return model_or_none(reader.name, reader.empty, self.model, self.overrides)

    def settings(self, model: ModelSpec, meet: str = "step") -> StepSettings:
        """How a step of the model runs, without a granularity as with `none`.

        Raises:
            InputError: if such a layout can't exist; it names the nearest values that can.
        """
        layout = Layout(self.tp, self.pp, self.cp)
        layout.check(model, self.ranks or 0, self.groups)
        return StepSettings(
            groups=self.groups, meet=meet, recompute=self.recompute, sharding=self.sharding,
            checkpointing=GRANULARITIES[self.recompute_granularity or "none"], layout=layout,
        )  # fmt: skip


def kind_of(annotation: Any) -> Kind | None:
    """The kind in an annotation; None if it has none."""
    return next((each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Kind)), None)


def checked(owner: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Values of fields of a class, or of arguments of a function, as they are meant, of those that have a kind.

    Raises:
        InputError: if one is not of its kind, and not None where that is the default.
    """
    defaults = signature(owner).parameters
    found = {name: kind_of(hint) for name, hint in get_type_hints(owner, include_extras=True).items()}
    return {
        name: None if value is None and defaults[name].default is None else kind.check(name, value)
        for name, value in values.items()
        if (kind := found.get(name))
    }
