"""Options of a GRPO trainer and its model that are refused, with the reason and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.utils import DistributedType, is_peft_model
from torch import nn

from trimtab.errors import InputError

LOADING = 'DistributedConfig(fsdp_size=N, ep_size=E, ep_implementation="trimtab")'


def check_supported(trainer: Any) -> None:
    """Raise InputError, naming the first option of a trainer that is not supported."""
    args, kind = trainer.args, trainer.accelerator.distributed_type
    parallelism = trainer.accelerator.parallelism_config
    _refuse(
        (
            kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU),
            f"accelerate runs with {kind.value}, and the model is sharded by transformers already; start it with "
            "torchrun or launch --multi_gpu",
        ),
        (
            parallelism is not None and parallelism.non_data_parallel_size > 1,
            "parallelism_config or tp_size has tensor, context or sequence parallelism; use tp_size=1",
        ),
        (args.fp16, "fp16=True scales losses by what one rank finds in its experts; use bf16=True"),
        (args.torch_compile, "torch_compile=True: planned layers change with every step; leave it out"),
        (args.use_liger_kernel, "use_liger_kernel=True replaces layers that are planned; leave it out"),
        (args.sync_ref_model, "sync_ref_model=True mixes weights of whole models; leave it out"),
        (
            args.use_transformers_continuous_batching and not args.use_vllm,
            "use_transformers_continuous_batching=True: ranks run different numbers of forwards; leave it out",
        ),
    )


def _refuse(*problems: tuple[Any, str]) -> None:
    """Raise InputError with the first problem that a trainer has; each is given with whether it has it."""
    for is_there, problem in problems:
        if is_there:
            raise InputError(f"TrimtabGRPOTrainer: {problem}")


def check_session_options(options: Mapping[str, Any]) -> None:
    """Raise InputError if a trainer does not support the mode of its session."""
    problem = "mode 'live' in session_options; every optimizer step is planned, so use mode 'plan'"
    _refuse((options.get("mode") == "live", problem))


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise InputError, naming the first argument of a trainer that is not supported."""
    args = arguments.get("args")
    uses_vllm = getattr(args, "use_vllm", False)
    _refuse(
        (
            getattr(args, "save_only_model", False) and getattr(args, "load_best_model_at_end", False),
            "load_best_model_at_end=True with save_only_model=True, which leaves out what it would load",
        ),
        (
            arguments.get("peft_config") is not None or is_peft_model(arguments["model"]),
            "PEFT adapters (peft_config, PeftModel); use trl.GRPOTrainer for these",
        ),
        (
            not uses_vllm and (arguments.get("tools") or arguments.get("environment_factory")),
            "tools and environment_factory, with which ranks call generate() different numbers of times; set "
            "use_vllm=True",
        ),
        (
            arguments.get("quantization_config") is not None,
            "quantization_config; load the model in bfloat16 or float32",
        ),
    )


def check_model(model: Any, *, disables_dropout: bool) -> None:
    """Raise InputError if a model was loaded in a way that is not supported, or its routes are random."""
    if not getattr(model, "is_distributed_loading_by_transformers", False):
        raise InputError(
            f"TrimtabGRPOTrainer: the model is whole on every rank; load it with distributed_config={LOADING}, or give "
            "its name and that config in model_init_kwargs"
        )
    if getattr(model, "_use_kernels", False):
        raise InputError("TrimtabGRPOTrainer: use_kernels=True replaces layers that are planned; load without it")
    config = model.config
    noise = max(getattr(config, name, None) or 0.0 for name in ("attention_dropout", "router_jitter_noise"))
    if not disables_dropout:
        noise = max([noise, *(module.p for module in model.modules() if isinstance(module, nn.Dropout))])
    if noise > 0:
        raise InputError(
            f"TrimtabGRPOTrainer: dropout or router noise of {noise}, under which routes can't be known before; set "
            "attention_dropout and router_jitter_noise of the model's config to 0, and disable_dropout=True"
        )
