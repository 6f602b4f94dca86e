"""Invalid arguments of sessions and layers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.rank_tests import runs_on_ranks
from trimtab.errors import InputError
from trimtab.runtime import Session, gated_experts


@runs_on_ranks()
def test_invalid_tensors_of_layers_are_refused() -> None:
    session = Session(num_experts=4)
    gate_up, down = torch.nn.Parameter(torch.randn(2, 8, 4)), torch.nn.Parameter(torch.randn(2, 4, 4))
    layer = session.add_layer([gate_up, down], gated_experts())
    flat = torch.randn(2 * 2 * 8 * 4)
    apart = [torch.nn.Parameter(part.view(2, 8, 4)) for part in flat.split(2 * 8 * 4)]
    for parameters in ([gate_up, torch.nn.Parameter(down.detach().clone())], [torch.nn.Parameter(gate_up.data), down]):
        with pytest.raises(InputError, match="layer 1 was added with an expert tensor of MoE layer 0"):
            session.add_layer(parameters, gated_experts())
    with pytest.raises(InputError, match="without expert tensors"):
        session.add_layer([], gated_experts())
    with pytest.raises(InputError, match="expert tensor 0 has no memory"):
        session.add_layer([torch.nn.Parameter(torch.empty(2, 8, 4, device="meta")), down], gated_experts())
    # Parts of one buffer that do not overlap.
    other = Session(num_experts=4)
    other.add_layer([apart[0], torch.nn.Parameter(down.detach().clone())], gated_experts())
    other.add_layer([apart[1], torch.nn.Parameter(down.detach().clone())], gated_experts())

    hidden, ids, weights = torch.randn(5, 4), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
    for arguments in ((hidden, ids, weights), (hidden[:4], ids, weights[:, :1]), (hidden[None, :4], ids, weights)):
        with pytest.raises(InputError, match=r"MoE layer 0 was given hidden \[.*they should be \[T, H\], \[T, K\]"):
            layer(*arguments)
    with pytest.raises(InputError, match=r"route\(\) was given ids \[4\]"):
        layer.route(ids[:, 0])
    session.plan_micro_steps([np.zeros((5, 1, 2), np.int64)])
    with session.micro_step(0), pytest.raises(RuntimeError, match="with 3 experts each; the micro-step was planned"):
        layer.route(torch.zeros(5, 3, dtype=torch.int64))
    for index in (1, -1, 0.5, None):
        with pytest.raises(InputError, match=f"micro-step {index} is not in the plan"):
            session.micro_step(index).__enter__()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0; it should be a whole number of 1 or more"),
        ({"num_experts": 3}, "2 ranks don't divide 3 experts"),
        ({"slots_per_rank": -1}, "slots_per_rank is -1; it should be a whole number of 0 or more"),
        ({"slots_per_rank": 1.5}, "slots_per_rank is 1.5"),
        ({"ring_layers": 1}, "ring_layers is 1; it should be a whole number of 2 or more"),
        ({"mode": "plam"}, "mode is 'plam'; it should be one of plan, static, live, shadow, off"),
        ({"paths": "nvlink"}, "paths is 'nvlink'; it should be one of both, peer, host"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0; it should be 1 or more"),
        ({"ranks_per_node": 3}, "3 ranks a node don't divide the 2 ranks"),
        ({"groups": 0}, "groups is 0; it should be a whole number of 1 or more"),
        ({"least_gain": float("nan")}, "least_gain is nan; it should be a finite number"),
        ({"mirror_bytes": -1}, "mirror_bytes is -1; it should be a whole number of 0 or more"),
        ({"peer_memory_bytes": -1}, "peer_memory_bytes is -1; it should be a whole number of 0 or more"),
        ({"max_rows_per_rank": 0}, "max_rows_per_rank is 0; it should be a whole number of 1 or more"),
        ({"max_rows_per_rank": 1.5}, "max_rows_per_rank is 1.5"),
    ],
)  # fmt: skip
@runs_on_ranks()
def test_invalid_arguments_of_sessions_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Session(**{"num_experts": 4} | arguments)
    assert message in str(caught.value)
    with pytest.raises(InputError, match="mode is 'none'"):
        Session(num_experts=4).mode = cast(Any, "none")


@runs_on_ranks()
def test_all_groups_have_the_timeout() -> None:
    for timeout in (None, timedelta(seconds=33)):
        topology = Session(num_experts=4, ranks_per_node=1, timeout=timeout).topology
        for name in ("weights", "gradients", "control", "expert_control", "node_control"):
            group = getattr(topology, name)
            expected = timeout or dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout  # type: ignore[union-attr]
            assert group._get_backend(torch.device("cpu")).options._timeout == expected, name
