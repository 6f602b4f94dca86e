"""Options of frameworks that their plugins refuse, by name, and how a flag switches each plugin on. Needs no framework.

Options of Megatron that a framework hands on are in `megatron/option_tables.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.integrations.megatron.option_tables import OFF, Option

VARIABLE = "TRIMTAB_BALANCE"
"""The environment variable with `PluginOptions`, of all plugins but verl's."""

_UNRECORDED = "MTP layers route tokens that were not recorded"
_ADAPTERS = "adapters add Parameters to experts"
_WHOLE = "train without LoRA"

SLIME = (
    Option("enable_mtp_training", OFF, _UNRECORDED, "train without MTP layers"),
    Option(
        "megatron_deepgemm_forward_layers", (None, []), "it replaces the dispatcher of these layers", "leave it out"
    ),
)
MILES = (
    Option("enable_mtp_training", OFF, _UNRECORDED, "train without MTP layers"),
    Option("lora_rank", (None, 0), _ADAPTERS, _WHOLE),
    Option("lora_adapter_path", (None,), _ADAPTERS, _WHOLE),
    Option("multi_lora", OFF, _ADAPTERS, _WHOLE),
    Option("indep_dp", OFF, "a part of the data ranks may end and start again", "leave it out"),
)
VERL = (
    Option("dynamic_context_parallel", OFF, "its schedule cuts micro-batches in another way", "leave it out"),
    Option("use_fused_kernels", OFF, "not tested with replicas", "leave it out"),
    Option("use_megatron_fsdp", OFF, "home experts have to be whole Parameters on their rank", "leave it out"),
    Option("qat.enable", OFF, "replicas are not quantized", "leave it out"),
    Option("lora.rank", (None, 0), "replicas are made without adapters", "train whole weights"),
    Option("mtp.enable", OFF, _UNRECORDED, "leave it out"),
)

NEMO_RL = (
    Option("megatron_cfg.peft.enabled", OFF, _ADAPTERS, _WHOLE),
    Option("megatron_cfg.fp8_cfg.enabled", OFF, "replicas are made without scales", "train in bfloat16"),
    Option("draft.enabled", OFF, "the draft model's hooks are not tested with replicas", "leave it out"),
    Option("quant_cfg", (None,), "its worker is another class, and replicas are not quantized", "leave it out"),
    Option(
        "generation.backend", (None, "vllm", "sglang", "trtllm", "dynamo"),
        "it generates with the trainer's own layers, which is not tested", "use vllm",
    ),
)  # fmt: skip


def refused(options: Sequence[Option], given: Mapping[str, Any]) -> list[str]:
    """Why given options can't be balanced, one line each."""
    return [
        f"{option.name}={given[option.name]} is not supported: {option.reason}; {option.remedy}"
        for option in options
        if option.name in given and given[option.name] not in option.supported
    ]


def wrong_mode(package: str, mode: str, replays: bool, flag: str = "--use-rollout-routing-replay") -> str:
    """Why a mode can't be used with or without recorded routing, which `flag` switches on; empty if it can."""
    if mode == "rehome":
        return (
            f"mode=rehome moves experts, and {package} copies weights of ref, teacher and old_actor into the same "
            "Parameters by position, so these models would compute with other experts; use mode=plan"
        )
    if mode == "live" and replays:
        return "mode=live balances what routers choose; with recorded routing use mode=plan"
    if mode not in ("live", "off") and not replays:
        return f"mode={mode} needs recorded routing; add {flag}, or use mode=live"
    return ""
