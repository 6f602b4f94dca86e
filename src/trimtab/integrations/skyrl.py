"""SkyRL: `python -m trimtab.integrations.skyrl -m skyrl.train.entrypoints.main_base ...` balances the policy; see
docs/frameworks.md.

The entry point runs in this process. SkyRL imports the policy's worker class in a Ray task, so each process of the job
gets a setup hook, which replaces the class where it is imported; see `skyrl_hook`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from trimtab.errors import InputError
from trimtab.framework_names import check_names
from trimtab.integrations.entry_point import run_entry_point
from trimtab.integrations.framework_options import (
    TABLES,
    megatron_refusals,
    raise_first,
    read_options,
    refused,
    value_at,
    wrong_mode,
)
from trimtab.integrations.options import PluginOptions
from trimtab.integrations.skyrl_hook import WORKERS, replace_worker_when_imported
from trimtab.launch.launcher import LAUNCH_ORDER
from trimtab.rank_variables import BALANCE

FITS = "SkyRL 0.3.0 and a9564572e"
HOOK = f"{replace_worker_when_imported.__module__}.{replace_worker_when_imported.__name__}"
_UTILS = "skyrl.train.utils.utils"
NAMES = (f"{_UTILS}:prepare_runtime_environment(cfg)",)
"""What this module replaces, in the process of the entry point; see `check_names`."""
REPLAY = "skyrl.backends.skyrl_train.utils.replay_utils"
LAYOUT = "skyrl.backends.skyrl_train.distributed.megatron.token_metadata"
WRAPPER = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
WORKER_NAMES = (
    f"{WRAPPER}:get_forward_backward_func",
    f"{REPLAY}:setup_per_microbatch_replay_forward(rollout_expert_indices, attention_mask, model_config, "
    "remove_microbatch_padding)",
    f"{WORKERS}:PolicyWorker",
    f"{WORKERS}:MegatronPolicyWorkerBase.init_model()",
    f"{WORKERS}:MegatronPolicyWorkerBase.forward_backward()",
    "skyrl.backends.skyrl_train.workers.worker:Worker.offload_to_cpu(offload_optimizer, offload_model)",
    f"{WORKERS}:MegatronPolicyWorkerBase.actor_module",
)
"""What the worker replaces and calls of SkyRL."""
LAYOUT_NAMES = (
    f"{LAYOUT}:build_token_metadata_layout(attention_mask, device, packed, fp8_enabled)",
    f"{REPLAY}:setup_per_microbatch_replay_forward(router_padding_mask, model, metadata_layout)",
)
"""And what it calls after 0.3.0, where replay has a layout of its own."""


def replace_worker() -> None:
    """Let the policy's workers of the job that this process starts have Trimtab's class.

    Raises:
        InputError: if an option is wrong, or SkyRL is missing or of another version.
    """
    options = read_options()
    if options.mode == "off":
        print("Trimtab in SkyRL: mode=off, nothing is replaced", flush=True)
        return
    check_names(NAMES, fits=FITS)
    # Some of SkyRL's programs make the workers in this process.
    replace_worker_when_imported()
    utils: Any = import_module(_UTILS)
    ray: Any = import_module("ray")
    utils.prepare_runtime_environment = _with_variables(utils.prepare_runtime_environment, options)
    ray.init = _with_hook(ray.init)


def check_supported(config: Any, options: PluginOptions) -> None:
    """Raise InputError with the first reason why a policy can't be balanced.

    Args:
        config: SkyRL's SkyRLTrainConfig.
    """
    megatron = value_at(config, "trainer.policy.megatron_config")
    problems = []
    strategy = value_at(config, "trainer.strategy")
    if strategy != "megatron":
        problems.append(f"trainer.strategy is {strategy}, and only Megatron has experts on several ranks")
    wrong = wrong_mode("skyrl", options.mode, bool(value_at(megatron, "moe_enable_routing_replay")))
    problems += [wrong] if wrong else []
    options_of_skyrl = (*TABLES["skyrl"], *(() if options.mode == "live" else TABLES["skyrl_replay"]))
    given = {each.name: value_at(config, each.name) for each in options_of_skyrl}
    problems += refused(options_of_skyrl, given, options.mode)
    parts = (value_at(megatron, name) for name in ("transformer_config_kwargs", "optimizer_config_kwargs"))
    problems += megatron_refusals(options.mode, vars(megatron), vars(value_at(megatron, "ddp_config")), *parts)
    raise_first("skyrl", problems)


def _with_variables(plain: Callable[[Any], dict[str, str]], options: PluginOptions) -> Callable[[Any], dict[str, str]]:
    """SkyRL's environment variables of Ray's processes, of a policy that can be balanced, and those of Trimtab."""

    @wraps(plain)
    def prepare(cfg: Any) -> dict[str, str]:
        check_supported(cfg, options)
        own = {name: os.environ.get(name, value) for name, value in LAUNCH_ORDER.items()}
        return plain(cfg) | own | {BALANCE: os.environ.get(BALANCE, "")}

    return prepare


def _with_hook(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`ray.init`; processes of the job run the hook before anything else."""

    @wraps(plain)
    def init(*args: Any, runtime_env: Any = None, **kwargs: Any) -> Any:
        other = (runtime_env or {}).get("worker_process_setup_hook")
        if other:
            raise InputError(f"skyrl can't be balanced: worker_process_setup_hook={other} is set; Ray runs one of them")
        return plain(*args, runtime_env={**(runtime_env or {}), "worker_process_setup_hook": HOOK}, **kwargs)

    return init


if __name__ == "__main__":
    sys.exit(run_entry_point("skyrl", replace_worker, sys.argv[1:], "-m skyrl.train.entrypoints.main_base"))
