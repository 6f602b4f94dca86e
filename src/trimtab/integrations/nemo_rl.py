"""NeMo-RL: `python -m trimtab.integrations.nemo_rl examples/run_grpo.py ...` balances the policy: docs/frameworks.md.

The script runs in this process. Policies that train on Megatron get the worker class of `nemo_rl_worker` by NeMo-RL's
own argument, `worker_extension_cls_fqn`. NeMo-RL hands the environment of this process on to its workers.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import Any

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
from trimtab.launch.launcher import LAUNCH_ORDER

FITS = "NeMo-RL 0.7.0 and 7ea279abf"
WORKER = "trimtab.integrations.nemo_rl_worker.BalancedPolicyWorker"
WORKERS = "nemo_rl.models.policy.workers.megatron_policy_worker"
PLAIN_WORKER = f"{WORKERS}.MegatronPolicyWorker"
_POLICY = "nemo_rl.models.policy.lm_policy"
_REGISTRY = "nemo_rl.distributed.ray_actor_environment_registry"
NAMES = (
    f"{_POLICY}:Policy.__init__(config, init_optimizer, worker_extension_cls_fqn)",
    f"{_REGISTRY}:ACTOR_ENVIRONMENT_REGISTRY",
)
"""What this module replaces and reads, in the process of the script; see `check_names`."""
_DATA = "nemo_rl.models.megatron.data"
WORKER_NAMES = (
    "nemo_rl.models.megatron.train:get_forward_backward_func",
    "nemo_rl.models.megatron.train:forward_with_post_processing_fn(use_router_replay)",
    "nemo_rl.models.megatron.router_replay:build_router_replay_tensors(model, routed_experts)",
    f"{_DATA}:_shard_routed_experts_for_cp(routed_experts, token_identity, seq_lengths, cu_seqlens, cu_seqlens_padded, "
    "cp_rank, cp_size)",
    f"{_DATA}:ProcessedMicrobatch.routed_experts_cp_sharded",
    f"{_DATA}:ProcessedMicrobatch.packed_seq_params",
    f"{_DATA}:ProcessedMicrobatch.cu_seqlens_padded",
    "nemo_rl.models.policy.utils:get_runtime_env_for_policy_worker(policy_worker_name)",
    f"{WORKERS}:MegatronPolicyWorkerImpl.train()",
    f"{WORKERS}:MegatronPolicyWorkerImpl.offload_before_refit()",
)
"""What the worker replaces and calls of NeMo-RL."""


def replace_worker() -> None:
    """Let policies that are made in this process, and train, have Trimtab's worker class.

    Raises:
        InputError: if an option is wrong, or NeMo-RL is missing or of another version.
    """
    options = read_options()
    if options.mode == "off":
        print("Trimtab in NeMo-RL: mode=off, nothing is replaced", flush=True)
        return
    check_names(NAMES, fits=FITS)
    # Read by NCCL in the workers when it makes a communicator.
    for name, value in LAUNCH_ORDER.items():
        os.environ.setdefault(name, value)
    environments = import_module(_REGISTRY).ACTOR_ENVIRONMENT_REGISTRY
    environments[WORKER] = environments[PLAIN_WORKER]
    policy = import_module(_POLICY).Policy
    policy.__init__ = _with_worker(policy.__init__, options)


def _with_worker(plain: Callable[..., None], options: PluginOptions) -> Callable[..., None]:
    """The constructor of `Policy`. Policies without an optimizer are teachers, judges and generators."""
    signature = inspect.signature(plain)

    @wraps(plain)
    def init(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        if call.arguments["init_optimizer"]:
            check_supported(call.arguments["config"], options, call.arguments["worker_extension_cls_fqn"])
            call.arguments["worker_extension_cls_fqn"] = WORKER
        plain(*call.args, **call.kwargs)

    return init


def check_supported(config: Mapping[str, Any], options: PluginOptions, extension: str | None) -> None:
    """Raise InputError with the first reason why a policy can't be balanced.

    Args:
        config: NeMo-RL's `policy`.
        extension: the `worker_extension_cls_fqn` that the script gives.
    """
    megatron = value_at(config, "megatron_cfg") or {}
    problems = []
    if not megatron.get("enabled"):
        problems.append("policy.megatron_cfg.enabled is not true, and only Megatron has experts on several ranks")
    if extension is not None:
        problems.append(f"worker_extension_cls_fqn={extension} replaces the worker too; leave one of them out")
    replays = bool(value_at(config, "router_replay.enabled"))
    wrong = wrong_mode("nemo_rl", options.mode, replays)
    problems += [wrong] if wrong else []
    table = TABLES["nemo_rl"]
    problems += refused(table, {option.name: value_at(config, option.name) for option in table}, options.mode)
    parts = ("model_overrides", "optimizer", "distributed_data_parallel_config")
    problems += megatron_refusals(options.mode, megatron, *(megatron.get(name) for name in parts))
    raise_first("nemo_rl", problems)


if __name__ == "__main__":
    sys.exit(run_entry_point("nemo_rl", replace_worker, sys.argv[1:], "examples/run_grpo.py"))
