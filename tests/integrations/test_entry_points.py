"""`python -m trimtab.integrations.nemo_rl SCRIPT`: the framework's script gets Trimtab's worker class, or one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from trimtab.errors import InputError
from trimtab.integrations import nemo_rl
from trimtab.integrations.entry_point import run_entry_point
from trimtab.integrations.options import PluginOptions

SOURCE = Path(__file__).parents[2] / "src"
NEMO_RL = {
    # nemo_rl/models/policy/lm_policy.py and worker_groups.py of 7ea279abf: the class by its name, and its environment.
    "nemo_rl/models/policy/lm_policy.py": """
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

class Policy:
    def __init__(
        self, cluster, config, tokenizer, name_prefix="lm_policy", init_optimizer=True, worker_extension_cls_fqn=None
    ):
        plain = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
        self.worker = worker_extension_cls_fqn or plain
        self.environment = ACTOR_ENVIRONMENT_REGISTRY[self.worker]
""",
    "nemo_rl/distributed/ray_actor_environment_registry.py": """
ACTOR_ENVIRONMENT_REGISTRY = {
    "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker": "uv run --extra mcore"
}
""",
    "examples/beside.py": "CONFIG = {'megatron_cfg': {'enabled': True}, 'router_replay': {'enabled': True}}",
    "examples/run_grpo.py": """
import os, sys
from beside import CONFIG
from nemo_rl.models.policy.lm_policy import Policy

if __name__ == "__main__":
    config = CONFIG | ({"quant_cfg": "fp8"} if "quantized" in sys.argv else {})
    student = Policy(None, config, tokenizer=None)
    teacher = Policy(None, {}, None, init_optimizer=False)
    print(sys.argv[1:], student.worker, student.environment, teacher.worker, os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"])
    sys.exit(3)
""",
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run(folder: Path, *arguments: str, package: str = "nemo_rl", **variables: str) -> subprocess.CompletedProcess[str]:
    """A run in a folder whose modules can be imported."""
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}:{folder}"} | variables
    command = [sys.executable, "-m", f"trimtab.integrations.{package}", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_nemo_rl_s_script_gets_the_worker_class(tmp_path: Path) -> None:
    write(tmp_path, NEMO_RL)
    found = run(tmp_path, "examples/run_grpo.py", "--config", "x.yaml", "grpo.max_num_steps=1")
    assert found.returncode == 3, found.stderr
    assert found.stdout.split("] ")[1].split() == [
        nemo_rl.WORKER, "uv", "run", "--extra", "mcore", nemo_rl.PLAIN_WORKER, "1",
    ]  # fmt: skip
    assert found.stdout.startswith("['--config', 'x.yaml', 'grpo.max_num_steps=1']")


def test_nothing_is_replaced_in_mode_off(tmp_path: Path) -> None:
    write(tmp_path, NEMO_RL)
    variables = {"TRIMTAB_BALANCE": "mode=off", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    path = f"{SOURCE}:{tmp_path}:{tmp_path / 'examples'}"
    found = run(tmp_path, "-m", "examples.run_grpo", PYTHONPATH=path, **variables)
    assert found.returncode == 3, found.stderr
    first, second = found.stdout.splitlines()
    assert "mode=off" in first
    assert nemo_rl.WORKER not in second
    assert second.endswith(" 0")


def test_refused_policies_end_the_run_with_one_line(tmp_path: Path) -> None:
    write(tmp_path, NEMO_RL)
    found = run(tmp_path, "examples/run_grpo.py", "quantized")
    assert (found.returncode, found.stdout) == (2, "")
    (line,) = found.stderr.splitlines()
    assert line.startswith("trimtab: nemo_rl can't be balanced: quant_cfg=fp8 is not supported")


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "usage: python -m trimtab.integrations.nemo_rl examples/run_grpo.py"),
        (["examples/run_other.py"], {}, "there is no script examples/run_other.py; usage: "),
        (["examples"], {}, "there is no script examples; usage: "),
        (["-m"], {}, "-m needs a module; usage: "),
        (["-m", "examples.run_other"], {}, "there is no module examples.run_other; usage: "),
        (["-m", "no.such"], {}, "there is no module no.such; usage: "),
        (["--config", "x.yaml"], {}, "--config is not an option; usage: "),
        (["examples/run_grpo.py"], {"TRIMTAB_BALANCE": "slots=1"}, "TRIMTAB_BALANCE has no option 'slots'"),
        (["examples/run_grpo.py"], {"TRIMTAB_BALANCE": "mode=rehome"}, "TRIMTAB_BALANCE has mode=rehome; it should be"),
        (["examples/run_grpo.py"], {}, "nemo_rl.models.policy.lm_policy can't be imported: "),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], message: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """NeMo-RL is not installed here."""
    write(tmp_path, {name: text for name, text in NEMO_RL.items() if name.startswith("examples")})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with mock.patch.dict(os.environ, variables):
        assert run_entry_point("nemo_rl", nemo_rl.replace_worker, arguments, "examples/run_grpo.py") == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith(f"trimtab: {message}")
    assert output.out == ""


def nemo_rl_config(**more: Any) -> dict[str, Any]:
    """The parts of NeMo-RL's examples/configs/grpo_math_1B_megatron.yaml that are read, with replay."""
    megatron = {
        "enabled": True, "optimizer": {"optimizer": "adam", "optimizer_cpu_offload": False},
        "cuda_graph_impl": "none", "cuda_graph_modules": [], "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none", "moe_shared_expert_overlap": False, "peft": {"enabled": False},
        "fine_grained_activation_offloading": False, "expert_tensor_parallel_size": 1, "fp8_cfg": None,
        "distributed_data_parallel_config": {
            "use_custom_fsdp": False, "data_parallel_sharding_strategy": "optim_grads_params",
        },
    }  # fmt: skip
    config = {
        "megatron_cfg": megatron | more.pop("megatron_cfg", {}), "draft": {"enabled": False},
        "router_replay": {"enabled": True}, "generation": {"backend": "vllm"}, "quant_cfg": None,
    }  # fmt: skip
    return config | more


@pytest.mark.parametrize(
    ("config", "mode", "message"),
    [
        ({"megatron_cfg": {"enabled": False}}, "plan", "megatron_cfg.enabled is not true"),
        ({"router_replay": None}, "shadow", "mode=shadow needs .*; set policy.router_replay.enabled=true"),
        ({}, "live", "mode=live .* with recorded routing use mode=plan"),
        ({"megatron_cfg": {"peft": {"enabled": True}}}, "plan", "megatron_cfg.peft.enabled=True is not supported"),
        ({"megatron_cfg": {"fp8_cfg": {"enabled": True}}}, "plan", "megatron_cfg.fp8_cfg.enabled=True is not"),
        ({"draft": {"enabled": True}}, "plan", "draft.enabled=True is not supported"),
        ({"quant_cfg": "FP8_DEFAULT_CFG"}, "plan", "quant_cfg=FP8_DEFAULT_CFG is not supported"),
        ({"generation": {"backend": "megatron"}}, "plan", "generation.backend=megatron is not supported"),
        ({"megatron_cfg": {"mtp_num_layers": 1}}, "plan", "mtp_num_layers=1 is not supported"),
        ({"megatron_cfg": {"moe_shared_expert_overlap": True}}, "plan", "moe_shared_expert_overlap=True is not"),
        (
            {"megatron_cfg": {"model_overrides": {"moe_router_fusion": True}, "mtp_num_layers": 1}}, "plan",
            r"moe_router_fusion=True is not .* \(1 more\)|mtp_num_layers=1 is not .* \(1 more\)",
        ),
        (
            {"megatron_cfg": {"distributed_data_parallel_config": {"use_custom_fsdp": True}}}, "plan",
            "use_custom_fsdp=True is not supported",
        ),
    ],
)  # fmt: skip
def test_nemo_rl_s_options_are_refused_by_name(config: dict[str, Any], mode: Any, message: str) -> None:
    options = PluginOptions(mode)
    nemo_rl.check_supported(nemo_rl_config(), PluginOptions(), None)
    with pytest.raises(InputError, match=f"^nemo_rl can't be balanced: .*{message}"):
        nemo_rl.check_supported(nemo_rl_config(**config), options, None)


def test_another_worker_class_is_refused() -> None:
    with pytest.raises(InputError, match=r"worker_extension_cls_fqn=my\.Worker replaces the worker too"):
        nemo_rl.check_supported(nemo_rl_config(), PluginOptions(), "my.Worker")
