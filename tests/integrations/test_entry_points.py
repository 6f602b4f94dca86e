"""`python -m trimtab.integrations.nemo_rl SCRIPT`, and `.skyrl`: the framework's script gets Trimtab's worker class, or
one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from trimtab.errors import InputError
from trimtab.integrations import nemo_rl, skyrl
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


_WORKERS = "skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py"
SKYRL = {
    # skyrl/train/utils/utils.py:682 and :891, skyrl/train/entrypoints/main_base.py:345, megatron_worker.py:1701 of
    # a9564572e.
    "ray.py": """
import json

def init(address=None, *, runtime_env=None, log_to_driver=True):
    print(json.dumps(runtime_env))

def remote(**_):
    return lambda actor: actor
""",
    "skyrl/train/utils/utils.py": """
import ray

def prepare_runtime_environment(cfg):
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

def initialize_ray(cfg):
    ray.init(runtime_env={"env_vars": prepare_runtime_environment(cfg)}, log_to_driver=True)
""",
    "skyrl/train/entrypoints/main_base.py": """
import sys
from types import SimpleNamespace as Config
from skyrl.train.utils.utils import initialize_ray

if __name__ == "__main__":
    megatron = Config(
        moe_enable_routing_replay=True, ddp_config=Config(), transformer_config_kwargs={}, optimizer_config_kwargs={}
    )
    strategy = "fsdp" if "fsdp" in sys.argv else "megatron"
    initialize_ray(Config(trainer=Config(strategy=strategy, policy=Config(megatron_config=megatron))))
    if "make" in sys.argv:
        from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import PolicyWorker
        print(PolicyWorker.__module__)
    sys.exit(3)
""",
    _WORKERS: """
import ray

class MegatronPolicyWorkerBase:
    pass

PolicyWorker = ray.remote(num_gpus=1)(MegatronPolicyWorkerBase)
""",
    "skyrl/backends/skyrl_train/distributed/megatron/token_metadata.py": "",
    "skyrl/backends/skyrl_train/utils/replay_utils.py": "",
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
        (["-m"], {}, "-m needs a module; usage: "),
        (["-m", "no.such"], {}, "there is no module no.such; usage: "),
        (["--config", "x.yaml"], {}, "--config is not an option; usage: "),
        (["examples/run_grpo.py"], {"TRIMTAB_BALANCE": "slots=1"}, "TRIMTAB_BALANCE has no option 'slots'"),
        (["examples/run_grpo.py"], {"TRIMTAB_BALANCE": "mode=static"}, "TRIMTAB_BALANCE has mode=static; it should be"),
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


def test_processes_of_skyrl_s_job_get_the_hook_and_the_options(tmp_path: Path) -> None:
    write(tmp_path, SKYRL)
    variables = {"TRIMTAB_BALANCE": "slots_per_rank=1", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    found = run(tmp_path, "-m", "skyrl.train.entrypoints.main_base", "make", package="skyrl", **variables)
    assert found.returncode == 3, found.stderr
    environment, worker = found.stdout.splitlines()
    assert json.loads(environment) == {
        "env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | variables, "worker_process_setup_hook": skyrl.HOOK,
    }  # fmt: skip
    # SkyRL's Tinker server makes the workers in this process.
    assert worker == "trimtab.integrations.skyrl_worker"


@pytest.mark.parametrize("first", ["", "trimtab.integrations.skyrl_worker"], ids=["task", "actor"])
def test_the_hook_replaces_the_worker_where_it_is_imported_and_loads_nothing_before(tmp_path: Path, first: str) -> None:
    """A task imports SkyRL's module; the process of an actor Trimtab's class."""
    write(tmp_path, SKYRL)
    module, _, name = skyrl.HOOK.rpartition(".")
    workers = _WORKERS.removesuffix(".py").replace("/", ".")
    program = f"""
import sys
from {module} import {name}
{name}()
assert not {{"torch", "numpy", "ray"}} & sys.modules.keys()
import {first or workers}
from {workers} import MegatronPolicyWorkerBase, PolicyWorker
assert PolicyWorker.__module__ == "trimtab.integrations.skyrl_worker"
assert issubclass(PolicyWorker, MegatronPolicyWorkerBase)
"""
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}:{tmp_path}"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_refused_skyrl_policies_end_the_run_with_one_line(tmp_path: Path) -> None:
    write(tmp_path, SKYRL)
    found = run(tmp_path, "-m", "skyrl.train.entrypoints.main_base", "fsdp", package="skyrl")
    assert (found.returncode, found.stdout) == (2, "")
    (line,) = found.stderr.splitlines()
    assert line.startswith("trimtab: skyrl can't be balanced: trainer.strategy is fsdp")


def test_nothing_is_replaced_in_skyrl_in_mode_off(tmp_path: Path) -> None:
    write(tmp_path, SKYRL)
    found = run(
        tmp_path, "-m", "skyrl.train.entrypoints.main_base", "make", package="skyrl", TRIMTAB_BALANCE="mode=off"
    )
    first, environment, worker = found.stdout.splitlines()
    assert "mode=off" in first
    assert json.loads(environment) == {"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    assert worker == _WORKERS.removesuffix(".py").replace("/", ".")


def test_another_setup_hook_of_ray_is_refused() -> None:
    with mock.patch.dict(sys.modules, ray=SimpleNamespace(init=lambda **_: None)):
        init = skyrl._with_hook(sys.modules["ray"].init)
        with pytest.raises(InputError, match=r"worker_process_setup_hook=my\.hook is set"):
            init(runtime_env={"worker_process_setup_hook": "my.hook"})


def skyrl_config(trainer: dict[str, Any], megatron: dict[str, Any]) -> Any:
    """The parts of SkyRLTrainConfig that are read, with the defaults of skyrl/train/config/config.py, and replay."""
    of_megatron: dict[str, Any] = {
        "tensor_model_parallel_size": 1, "expert_tensor_parallel_size": None, "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none", "moe_grouped_gemm": True, "moe_enable_routing_replay": True,
        "mtp_num_layers": None, "transformer_config_kwargs": {"recompute_granularity": "full"},
        "ddp_config": SimpleNamespace(overlap_grad_reduce=False),
        "optimizer_config_kwargs": {"optimizer_cpu_offload": False, "use_precision_aware_optimizer": False},
    }  # fmt: skip
    model = SimpleNamespace(lora=SimpleNamespace(rank=0), fake_int4_qat=SimpleNamespace(enabled=False))
    policy = SimpleNamespace(model=model, megatron_config=SimpleNamespace(**of_megatron | megatron))
    defaults = {
        "strategy": "megatron", "mtp": SimpleNamespace(enabled=False), "remove_microbatch_padding": True,
        "policy": policy,
    }  # fmt: skip
    config = SimpleNamespace(trainer=SimpleNamespace(**defaults))
    for path, value in trainer.items():
        *parents, name = path.split(".")
        owner = config.trainer
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    return config


@pytest.mark.parametrize(
    ("trainer", "megatron", "mode", "message"),
    [
        ({"strategy": "fsdp"}, {}, "plan", "trainer.strategy is fsdp"),
        ({}, {"moe_enable_routing_replay": False}, "shadow", "mode=shadow needs .*moe_enable_routing_replay=true"),
        ({}, {}, "live", "mode=live .* with recorded routing use mode=plan"),
        ({"policy.model.lora.rank": 8}, {}, "plan", "trainer.policy.model.lora.rank=8 is not supported"),
        ({"policy.model.fake_int4_qat.enabled": True}, {}, "plan", "fake_int4_qat.enabled=True is not supported"),
        ({"mtp.enabled": True}, {}, "plan", "trainer.mtp.enabled=True is not supported"),
        ({"remove_microbatch_padding": False}, {}, "plan", "remove_microbatch_padding=False is not supported"),
        (
            {}, {"transformer_config_kwargs": {"virtual_pipeline_model_parallel_size": 2}}, "plan",
            "virtual_pipeline_model_parallel_size=2 is not supported",
        ),
        ({}, {"mtp_num_layers": 1}, "plan", "mtp_num_layers=1 is not supported"),
        ({}, {"tensor_model_parallel_size": 2}, "plan", "expert_tensor_parallel_size=None is not"),
        ({}, {"ddp_config": SimpleNamespace(use_megatron_fsdp=True)}, "plan", "use_megatron_fsdp=True is not"),
    ],
)  # fmt: skip
def test_skyrl_s_options_are_refused_by_name(
    trainer: dict[str, Any], megatron: dict[str, Any], mode: Any, message: str
) -> None:
    skyrl.check_supported(skyrl_config({}, {}), PluginOptions())
    live = skyrl_config({"remove_microbatch_padding": False}, {"moe_enable_routing_replay": False})
    skyrl.check_supported(live, PluginOptions("live"))
    with pytest.raises(InputError, match=f"^skyrl can't be balanced: .*{message}"):
        skyrl.check_supported(skyrl_config(trainer, megatron), PluginOptions(mode))
