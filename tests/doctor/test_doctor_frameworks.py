"""`trimtab doctor --verl`, `--slime` and `--miles`: what a plugin would refuse, from the files that users have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trimtab.cli.main import main
from trimtab.doctor import FILE_CHECKS
from trimtab.doctor.finding import Finding
from trimtab.errors import InputError

ARGUMENTS = """#!/bin/bash
MODEL_ARGS=( --num-experts 128 --num-layers 48 --moe-router-topk 8 --moe-token-dispatcher-type alltoall )
export EP=8
ARGS=(
   --custom-megatron-init-path trimtab.integrations.{package}.install
   --use-rollout-routing-replay
   --expert-model-parallel-size $EP --expert-tensor-parallel-size 1
   --train-env-vars '{{"TRIMTAB_BALANCE": "{balance}", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}}' {more}
)
ray job submit -- python3 train.py ${{MODEL_ARGS[@]}} ${{ARGS[@]}}
"""
ENGINE = "actor_rollout_ref.actor.megatron"
VERL = {
    "actor_rollout_ref.model.external_lib": "trimtab.integrations.verl",
    f"{ENGINE}.router_replay.mode": "R3",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": True,
    f"{ENGINE}.override_mcore_model_config.trimtab.mode": "plan",
    f"{ENGINE}.expert_model_parallel_size": 8,
    f"{ENGINE}.expert_tensor_parallel_size": 1,
}


def script(package: str, *, balance: str = "mode=plan slots_per_rank=2", more: str = "") -> str:
    return ARGUMENTS.format(package=package, balance=balance, more=more)


def tree_of(settings: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        place, *path = tree, *name.split(".")
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = value
    return tree


def problems(kind: str, path: Path, text: str) -> list[Finding]:
    path.write_text(text)
    return [finding for finding in FILE_CHECKS[kind](path) if finding.status == "problem"]


@pytest.mark.parametrize("package", ["slime", "miles"])
def test_arguments_with_the_flag_have_no_problem(package: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    assert problems(package, path, script(package)) == []
    found = {finding.name: finding.text for finding in FILE_CHECKS[package](path)}
    assert found[f"{package} options"] == "mode=plan slots_per_rank=2"
    assert "EP 8" in found["megatron layout"]
    # Checkpoints alone are renumbered there.
    assert "megatron renumbering" not in found


@pytest.mark.parametrize(
    ("package", "change", "says"),
    [
        ("slime", {"more": "--enable-mtp-training"}, "enable_mtp_training=True"),
        ("slime", {"more": "--megatron-deepgemm-forward-layers 1 2"}, "megatron_deepgemm_forward_layers"),
        ("slime", {"balance": "mode=plan slots=2"}, "no option 'slots'"),
        ("miles", {"more": "--lora-rank 16"}, "lora_rank=16"),
        ("miles", {"more": "--indep-dp"}, "indep_dp=True"),
    ],
)
def test_what_a_plugin_refuses_is_a_problem(package: str, change: dict[str, str], says: str, tmp_path: Path) -> None:
    (found,) = problems(package, tmp_path / "run.sh", script(package, **change))
    assert says in found.text


def test_missing_flags_are_problems(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    (found,) = problems("slime", path, script("miles"))
    assert "--custom-megatron-init-path should be trimtab.integrations.slime.install; it is trimtab" in found.text
    (found,) = problems("slime", path, script("slime").replace("--use-rollout-routing-replay", ""))
    assert "needs recorded routing; add --use-rollout-routing-replay" in found.text
    shell = script("slime").replace("--train-env-vars", "--env") + "export TRIMTAB_BALANCE='mode=off'\n"
    assert problems("slime", path, shell.replace('"TRIMTAB_BALANCE": "mode=plan slots_per_rank=2", ', "")) == []


@pytest.mark.parametrize("kind", ["run.sh", "config.yaml", "config.json"])
def test_settings_of_verl_with_the_flag_have_no_problem(kind: str, tmp_path: Path) -> None:
    assert problems("verl", tmp_path / kind, written(kind, VERL)) == []


def flat(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        inner = value.items() if isinstance(value, dict) else ()
        yield from ((f"{name}.{key}", each) for key, each in inner) if inner else [(name, value)]


def written(kind: str, settings: dict[str, Any]) -> str:
    if kind == "run.sh":
        words = " \\\n  ".join(f"+{name}={value}" for name, value in flat(settings))
        return f"# {ENGINE}.use_megatron_fsdp=True\npython3 -m verl.trainer.main_ppo --config-path=./config {words}\n"
    return json.dumps(tree_of(settings))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"actor_rollout_ref.model.external_lib": None}, "not switched on"),
        ({f"{ENGINE}.router_replay.mode": "disabled"}, "mode=plan needs recorded routing"),
        ({"actor_rollout_ref.rollout.enable_rollout_routing_replay": False}, "R3 needs"),
        ({"actor_rollout_ref.model.use_fused_kernels": True}, "use_fused_kernels=True"),
        ({"actor_rollout_ref.model.lora.rank": 8}, "lora.rank=8"),
        ({"actor_rollout_ref.model.mtp.enable": True}, "mtp.enable=True"),
        ({f"{ENGINE}.use_megatron_fsdp": True}, "use_megatron_fsdp=True"),
        ({f"{ENGINE}.qat.enable": True}, "qat.enable=True"),
        ({f"{ENGINE}.override_transformer_config.moe_router_fusion": True}, "moe_router_fusion"),
        ({f"{ENGINE}.override_mcore_model_config.trimtab.moves": True}, "no option 'moves'"),
        ({"actor_rollout_ref.actor.strategy": "fsdp"}, "no expert parallelism"),
    ],
)
def test_what_verl_s_plugin_refuses_is_a_problem(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    for kind in ("run.sh", "config.yaml"):
        found = problems("verl", tmp_path / kind, written(kind, VERL | change))
        assert any(says in finding.text for finding in found), kind
        assert len(found) <= 2


def test_the_command_says_it_and_files_of_something_else_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script("slime", more="--enable-mtp-training"))
    assert main(["doctor", "--slime", str(path)]) == 1
    assert "enable_mtp_training" in capsys.readouterr().out
    with pytest.raises(InputError, match="no setting of actor_rollout_ref"):
        FILE_CHECKS["verl"](path)
    assert main(["doctor", "--gpu", "--slime", str(path)]) == 2
