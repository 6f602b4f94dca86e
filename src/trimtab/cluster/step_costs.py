"""`StepCosts`: seconds of a step's operations and how often they run, which planning minimises."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.cluster.models import ModelSpec
from trimtab.cluster.operations import OperationCosts
from trimtab.cluster.parallel_layout import ZERO1, Checkpointing, Layout
from trimtab.cluster.specs import RING_LAYERS, ClusterSpec

# All-to-alls of an instance in a forward or a backward: dispatch and combine.
ALL_TO_ALLS = 2


@dataclass(frozen=True)
class StepCosts:
    """What planning minimises: the time of a step on a cluster.

    Attributes:
        operations: seconds of each operation.
        forwards: forwards of every micro-step: one for the update, one to recompute log-probabilities before it, and
            one more where activations are computed again for backward.
        ring_layers: layers with replicas in shared slots at the same time.
    """

    operations: OperationCosts
    forwards: int = 2
    ring_layers: int = RING_LAYERS

    @classmethod
    def of(
        cls,
        cluster: ClusterSpec,
        model: ModelSpec,
        *,
        moe_layers: int | None = None,
        groups: int = 1,
        recompute: bool = True,
        checkpointing: Checkpointing = False,
        ring_layers: int = RING_LAYERS,
        sharding: str = ZERO1,
        layout: Layout | None = None,
    ) -> StepCosts:
        """Costs of a model on a cluster.

        Args:
            moe_layers, groups, sharding, layout: as in `OperationCosts.of`.
            recompute: whether log-probabilities are recomputed before the update.
            checkpointing: activations that are computed again for backward.
        """
        operations = OperationCosts.of(
            cluster, model, moe_layers=moe_layers, groups=groups, sharding=sharding, checkpointing=checkpointing,
            layout=layout,
        )  # fmt: skip
        return cls(operations, 1 + recompute + (checkpointing is True), ring_layers)

    @property
    def computed_row_s(self) -> float:
        """Seconds of one more row on a rank, through one expert, in all passes of a step."""
        operations = self.operations
        row_s = operations.tile_s / operations.tile_rows + operations.row_s
        return (self.forwards + operations.expert_backward) * row_s

    @property
    def crossings(self) -> int:
        """How often a row crosses the network in a step, to its expert or back."""
        return ALL_TO_ALLS * (self.forwards + 1)
