"""`ClusterSpec`: which figures are allowed."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab import ClusterSpec, InputError

FLOPS_AND_BYTES = [
    "expert_flops", "dense_flops", "attention_flops", "memory_bytes_per_s", "dispatch_node_bytes_per_s",
    "dispatch_network_bytes_per_s", "device_bytes",
]  # fmt: skip
NAN = float("nan")


def test_ranks_that_do_not_make_whole_nodes_are_refused() -> None:
    # Fixed times may be zero.
    assert ClusterSpec(16, 8, copy_s=0, layer_s=0, dispatch_s=0, tile_rows=1).nodes == 2
    for ranks, per_node in ((12, 8), (0, 1), (4, 0), (4, 8)):
        with pytest.raises(InputError, match="don't make whole nodes"):
            ClusterSpec(ranks, per_node)
    for ranks, per_node, fitting in ((12, 8, 6), (1, 4, 1), (4, 8, 4), (7, 2, 1)):
        with pytest.raises(InputError, match=f", for example {fitting}$"):
            ClusterSpec(ranks, per_node)


@pytest.mark.parametrize(
    "values",
    [
        *({name: value} for name in FLOPS_AND_BYTES for value in (0.0, -1e12, 400.0, float("inf"), NAN)),
        *({name: value} for name in ("copy_s", "layer_s", "dispatch_s") for value in (-1e-6, 30.0, NAN)),
        *({name: value} for name in ("dense_backward", "expert_backward") for value in (0.0, float("inf"), NAN)),
        {"tile_rows": 0},
        {"planning_threads": 0},
        {"slots_per_rank": -1},
    ],
)
def test_figures_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="should be") as caught:
        ClusterSpec(16, 8, **values)
    (name,) = values
    assert name.replace("_", " ") in str(caught.value).replace("_", " ")
    assert "\n" not in str(caught.value)
