"""Small models with users' options train as Megatron's own, also with other ids of experts. For options in a file:

OPTIONS=path/to/pretrain.sh python -m pytest tests/integrations/test_megatron_options.py
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from helpers.examples import examples
from helpers.megatron_renumbering import BY_POSITION, RESHARDABLE, Pair, compare_checkpoints, save_checkpoints
from helpers.megatron_runs import NEED_GPU, case_of, compare_runs, layout_of, use_layout
from helpers.rank_pool import on_ranks
from trimtab.doctor.megatron_check import read_options
from trimtab.integrations.megatron.option_tables import immovable, refusals

IS_RESHARDABLE = "dist_ckpt_optim_fully_reshardable"
FILE = os.environ.get("OPTIONS", "")
DISTRIBUTED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
RUNS: dict[str, dict[str, Any]] = {
    "distributed optimizer, by position": {
        **DISTRIBUTED, "recompute_granularity": "full", "recompute_method": "uniform",
    },
    "tensor parallelism": {
        "tensor_model_parallel_size": 8, "optimizer": "sgd", "moe_router_load_balancing_type": ["seq_aux_loss"],
        "moe_aux_loss_coeff": 1e-2, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "flex", "swiglu": True,
    },
    "interleaved, bfloat16": {
        **DISTRIBUTED, "pipeline_model_parallel_size": 4, "bf16": True, "num_layers_per_virtual_pipeline_stage": 2,
        IS_RESHARDABLE: True, "moe_router_num_groups": 8, "moe_router_group_topk": 4,
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "none", "moe_shared_expert_intermediate_size": 100,
    },
    "ids stay": {"use_precision_aware_optimizer": True, "moe_router_load_balancing_type": "none"},
}  # fmt: skip


@pytest.mark.parametrize("name", examples(short=list(RUNS)[:2], long=list(RUNS)))
def test_options_train_as_megatron_s_own(name: str, tmp_path: Path) -> None:
    check(RUNS[name], tmp_path)


@pytest.mark.skipif(not FILE, reason="OPTIONS names no file with options: a script, a log, JSON or YAML")
def test_options_of_the_file_train_as_megatron_s_own(tmp_path: Path) -> None:
    values, unknown = read_options(Path(FILE))
    assert refusals(values) == {}
    if left_out := sorted(NEED_GPU & values.keys()) + unknown:
        warnings.warn(f"without {', '.join(left_out)}: they need a GPU, or the file has no value", stacklevel=1)
    check(values, tmp_path)


def check(values: dict[str, Any], folder: Path) -> None:
    on_ranks(train, (values, str(folder)), ranks=layout_of(values).ranks, patched="megatron")


def train(values: dict[str, Any], folder: str) -> None:
    """Planned steps; then steps and checkpoints of a renumbered model, if these options allow that in a run."""
    layout, case = layout_of(values), case_of(values)
    # Rounding of several steps: sums over a token's experts have another order.
    limit = 3e-2 if case.bf16 else 1e-4
    assert max(compare_runs(layout, [case])) < limit
    if immovable(values):
        return
    use_layout(layout)
    pair = Pair(layout, case)
    pair.train(3)
    assert pair.renumbered > 0 < pair.replicas
    assert pair.weights_error() < limit
    assert pair.difference() < limit
    pair.session.remove()
    if case.adam or case.distributed_optimizer:
        # Megatron can't load those of SGD.
        kind = BY_POSITION if case.distributed_optimizer and not values.get(IS_RESHARDABLE) else RESHARDABLE
        save_checkpoints(layout, case, folder, 2, kind)
        compare_checkpoints(layout, case, folder, kind)
