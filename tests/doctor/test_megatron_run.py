"""`trimtab doctor --megatron FILE --run`: small runs of users' options are equal, and mistakes are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.examples import examples, nightly_except
from helpers.rank_pool import on_ranks
from helpers.rank_tests import runs_on_ranks
from trimtab.cli.main import main
from trimtab.doctor import megatron_run
from trimtab.doctor.finding import Finding
from trimtab.doctor.megatron_run import compare, run_megatron

DISTRIBUTED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
RUNS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "distributed optimizer, by position": (
        {**DISTRIBUTED, "recompute_granularity": "full", "recompute_method": "uniform"}, {"TP": 1, "PP": 1}
    ),
    "tensor parallelism": (
        {"optimizer": "sgd", "moe_router_load_balancing_type": ["seq_aux_loss"], "moe_aux_loss_coeff": 1e-2,
         "moe_grouped_gemm": True, "moe_token_dispatcher_type": "flex"}, {"TP": 2, "PP": 1},
    ),
    "interleaved, bfloat16": (
        {**DISTRIBUTED, "bf16": True, "num_layers_per_virtual_pipeline_stage": 2,
         "dist_ckpt_optim_fully_reshardable": True, "moe_router_num_groups": 8, "moe_router_group_topk": 4,
         "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
         "moe_router_load_balancing_type": "none", "moe_shared_expert_intermediate_size": 100}, {"TP": 1, "PP": 2},
    ),
    "experts stay": (
        {"use_precision_aware_optimizer": True, "moe_router_load_balancing_type": "none"}, {"TP": 1, "PP": 1}
    ),
}  # fmt: skip
"""Options, and sizes of the run."""


@pytest.mark.parametrize("name", examples(short=list(RUNS)[:2], long=list(RUNS)))
def test_runs_are_equal(name: str) -> None:
    on_ranks(check_run, (name,), ranks=2 * RUNS[name][1]["PP"], patched="megatron")


def check_run(name: str) -> None:
    values, sizes = RUNS[name]
    found = compare(values, sizes)
    assert {finding.status for finding in found} == {"ok"}, found
    assert len(found) == (3 if "precision" in str(values) else 5)
    where = "were away" if "dist_ckpt_optim_fully_reshardable" in values else "returned home"
    assert len(found) == 3 or found[3].text.endswith(where)


MISTAKES: dict[str, tuple[str, str, Any]] = {
    "exports": ("balanced_layer", "check_reader", lambda where: None),
    "exports ": ("logical_order", "rename_experts", lambda pairs, places: iter(pairs)),
    "checkpoint": ("balanced_layer", "logical_shards", lambda *_: None),
    "steps": ("optimizer_state.MegatronState", "row_parts", lambda self, layers: [[] for _ in layers]),
}
"""By the finding that has it: what is replaced in the integration."""


@pytest.mark.parametrize("finding", nightly_except(MISTAKES, "exports", "checkpoint", "steps"))
@runs_on_ranks(2, "megatron")
def test_mistakes_are_found(finding: str) -> None:
    import importlib

    place, name, wrong = MISTAKES[finding]
    module, _, attribute = place.partition(".")
    owner = importlib.import_module(f"trimtab.integrations.megatron.{module}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(owner, attribute) if attribute else owner, name, wrong)
        found = compare(
            {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}, {"TP": 1, "PP": 1}
        )
    problems = [each.name.rpartition(" ")[2] for each in found if each.status == "problem"]
    assert finding.strip() in problems, found


@runs_on_ranks(2, "megatron")
def test_a_run_without_replicas_shows_nothing() -> None:
    """As of a user whose variable switches balancing off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIMTAB_BALANCE", "mode=off")
        patch.setattr(megatron_run, "STEPS", 1)
        steps = compare(*RUNS["experts stay"])[1]
    assert steps.status == "problem"
    assert steps.text.startswith("1 steps with 0 replicas and 0 moved experts")


def test_the_command_reports_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trimtab.doctor import self_check

    monkeypatch.setattr(self_check, "check_paths", lambda ranks: [self_check.PathCheck("peer", 4, 1e-16)])
    monkeypatch.setattr(megatron_run, "run_megatron", lambda path: [Finding("megatron run", "problem", path.name)])
    file = tmp_path / "a.json"
    file.write_text(
        json.dumps({"num_moe_experts": 8, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"})
    )
    assert main(["doctor", "--megatron", str(file), "--run"]) == 1
    assert "megatron run: a.json" in capsys.readouterr().err
    assert main(["doctor", "--run"]) == 2
    assert "--run is for --megatron FILE" in capsys.readouterr().err


def test_refused_options_are_not_run(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"fp8": "e4m3"}))
    (finding,) = run_megatron(file)
    assert (finding.status, finding.text) == ("warning", "not run, since fp8 are refused")
