"""`ComparisonCase`: the steps that balancers are compared on, their cluster and model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

from trimtab.array_type import Array
from trimtab.cluster import ClusterSpec, ModelSpec
from trimtab.errors import InputError
from trimtab.planner import SequenceCounts
from trimtab.simulator.resampling import LEAST_SEQUENCES, ResampledTrace
from trimtab.simulator.step import StepSettings
from trimtab.trace import RoutingTrace
from trimtab.trace.numbering import permute_experts, random_orders


@dataclass(frozen=True, eq=False)
class ComparisonCase:
    """One step to plan, the input of all balancers.

    Attributes:
        cluster: the ranks of one expert-parallel group.
        sequences: the step's routing by sequence.
        earlier: routing of the steps before, oldest first, for balancers that use past loads. A balancer that moves
            homes plans all of them in turn and starts from the homes that it reaches.
        token_budget: most tokens of a rank in one micro-step.
        mini_batches: optimizer steps; sequences are assigned in their order.
        equal_terms: True: all balancers use contiguous homes, the length-packed schedule and the same number of slots,
            so only replica placement and token split differ. False: each balancer uses its authors' configuration.
        settings: how the step is executed.
        measured: the last steps, `sequences` among them, whose mean is the result.
        traces: tokens of the last steps, with the sequences of each; transfers that tokens share are estimated where
            they are missing.
        order_LE: `[L, E]` ids of the traces by those of the case; None for the same.
        halves: the same case from each half of the recorded prompts, if the steps were resampled. The seconds of
            balancers are then those of a step without the skew that resampling adds.
        recorded: fewest recorded sequences of a measured step, if the steps were resampled; else None.
        past_is_drawn: whether `earlier` is another drawing of a trace's single step.
        slots: numbers of slots of a rank, ascending, of which each balancer has the best; none: the cluster's. On equal
            terms all have the cluster's.
        assumed: sentences on what nobody stated, each with the option that changes it.
    """

    cluster: ClusterSpec
    model: ModelSpec
    sequences: SequenceCounts
    earlier: tuple[SequenceCounts, ...]
    token_budget: int
    mini_batches: int = 1
    equal_terms: bool = False
    settings: StepSettings = field(default_factory=StepSettings)
    measured: int = 1
    traces: tuple[RoutingTrace | ResampledTrace, ...] = ()
    order_LE: Array | None = None
    halves: tuple[ComparisonCase, ...] = ()
    recorded: int | None = None
    past_is_drawn: bool = False
    slots: tuple[int, ...] = ()
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.measured <= 1 + len(self.earlier):
            raise InputError(f"{self.measured} steps to simulate: the case has {1 + len(self.earlier)}")

    @property
    def steps(self) -> tuple[SequenceCounts, ...]:
        """Routing of all steps, oldest first."""
        return *self.earlier, self.sequences

    @property
    def knows_past(self) -> bool:
        """Whether balancers that plan from past steps can be compared: there are some, of enough sequences."""
        return bool(self.earlier) and not self.is_too_small

    @property
    def is_too_small(self) -> bool:
        """Whether too few sequences were recorded to compare balancers."""
        return self.recorded is not None and self.recorded < LEAST_SEQUENCES

    @property
    def scale(self) -> float:
        """MoE layers of the model divided by those of the trace. Seconds and bytes are those of the whole model."""
        return self.model.moe_layers / self.sequences.num_layers

    def with_slots(self, *numbers: int) -> ComparisonCase:
        """The case with so many slots of a rank, or with several numbers of which each balancer has the best."""
        cluster = replace(self.cluster, slots_per_rank=numbers[0])
        halves = tuple(half.with_slots(*numbers) for half in self.halves)
        return replace(self, cluster=cluster, slots=numbers if len(numbers) > 1 else (), halves=halves)

    def with_permuted_experts(self, seed: int) -> ComparisonCase:
        """The case with the experts of every layer in random order, the same in all steps."""
        sequences = self.sequences
        return self.permuted(random_orders(sequences.num_layers, sequences.num_experts, seed, self.model.expert_groups))

    def permuted(self, order_LE: Array) -> ComparisonCase:
        """The case with the experts of every layer in another order, `[L, E]` old ids by new ones, in all steps."""

        def permuted(part: SequenceCounts) -> SequenceCounts:
            return replace(part, counts_SLE=permute_experts(part.counts_SLE, order_LE))

        return replace(
            self,
            sequences=permuted(self.sequences),
            earlier=tuple(map(permuted, self.earlier)),
            order_LE=order_LE if self.order_LE is None else np.take_along_axis(self.order_LE, order_LE, axis=1),
            halves=tuple(half.permuted(order_LE) for half in self.halves),
        )

    def mini_batch_of(self, sequences: SequenceCounts) -> Array:
        """The mini-batch of each sequence. No mini-batch is empty, so there may be fewer."""
        count = sequences.num_sequences
        return np.arange(count) * min(self.mini_batches, count) // max(1, count)


def step_of(trace: RoutingTrace, step: int | None) -> tuple[RoutingTrace, list[RoutingTrace]]:
    """The step to simulate, the last by default, and those before it. Raises InputError if there is no such step."""
    steps = np.unique(trace.steps)
    chosen = int(steps[-1]) if step is None else step
    if chosen not in steps:
        raise InputError(f"there is no step {chosen}; the trace has steps {steps[0]} to {steps[-1]}")
    parts = [trace.shared(np.flatnonzero(trace.steps == each)) for each in steps[steps <= chosen]]
    return parts[-1], parts[:-1]


def trace_hash(trace: RoutingTrace) -> str:
    """A digest of the planner's input: routing, sequences and steps."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (trace.expert_ids, trace.sequence_starts, trace.steps, trace.layer_indices):
        digest.update(str((array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
