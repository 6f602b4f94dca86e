"""What a planned layer launches on a GPU: operations, passes over its rows, and nothing that the host waits for.

The numbers are those of today. A change that needs more of them should say why, and raise them here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.transfer_plans import one_rank_plan
from trimtab.runtime import ExpertLayer, Session, gated_experts
from trimtab.trace import RoutingTrace, synthesize

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 256, 64, 32, 16, 4
ROWS = TOKENS * TOP_K

# They launch no work.
VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "detach", "alias", "slice", "select", "split", "split_with_sizes",
    "unsqueeze", "squeeze", "expand", "as_strided", "_reshape_alias", "empty", "new_empty", "empty_like",
    "empty_strided", "lift_fresh", "view_as", "chunk", "permute", "unbind", "narrow",
}  # fmt: skip
# The host waits for their result.
WAITS = {
    "_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim", "_unique2",
    "unique_consecutive", "_assert_async", "bincount", "repeat_interleave",
}  # fmt: skip
PRODUCTS = {"_grouped_mm", "mm", "bmm", "addmm"}


@dataclass
class Launched(TorchDispatchMode):
    """Counts operations.

    Attributes:
        names: of the operations, in order.
        elements: read and written by those that are no matrix products.
    """

    names: list[str] = field(default_factory=list)
    elements: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name not in VIEWS:
            self.names.append(name)
            if name not in PRODUCTS:
                used = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
                made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
                self.elements += sum({id(tensor): tensor.numel() for tensor in [*used, *made]}.values())
        return result

    @property
    def row_passes(self) -> float:
        """Elements as multiples of those of all rows."""
        return self.elements / (ROWS * HIDDEN)


@pytest.fixture
def planned() -> Iterator[tuple[Session, ExpertLayer, RoutingTrace, list[torch.nn.Parameter]]]:
    """A session of one rank, whose two busiest experts have a replica."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    trace = synthesize(
        num_sequences=4, sequence_length=TOKENS // 4, num_layers=1, num_experts=EXPERTS, top_k=TOP_K, zipf=1.0, seed=0
    )
    session = Session(num_experts=EXPERTS, slots_per_rank=2)
    shapes = ((EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)) for shape in shapes]
    layer = session.add_layer(parameters, gated_experts())
    session.apply_step_plan(one_rank_plan(trace, slots=2), trace)
    yield session, layer, trace, parameters
    session.close()
    dist.destroy_process_group()


def test_a_planned_layer_launches_no_more_than_today(
    planned: tuple[Session, ExpertLayer, RoutingTrace, list[torch.nn.Parameter]],
) -> None:
    session, layer, _, parameters = planned
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(TOKENS, TOP_K).softmax(-1).to(torch.bfloat16).requires_grad_()
    live_ids, gradient = torch.zeros(TOKENS, TOP_K, dtype=torch.int64), torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
    for tensor in (*parameters, hidden, weights):
        tensor.grad = torch.zeros_like(tensor)
    with session.micro_step(0):
        with Launched() as routing:
            ids = layer.route(live_ids)
        with Launched() as forward:
            output = layer(hidden, ids, weights)
        with Launched() as backward:
            output.backward(gradient)
    # Three operations of routing compare the router's choice with the record, for `moe/replay_agreement`.
    for launched, operations, passes in ((routing, 4, 0.2), (forward, 17, 15.1), (backward, 42, 28.5)):
        assert not WAITS & {*launched.names}
        assert len(launched.names) <= operations, launched.names
        assert launched.row_passes <= passes
