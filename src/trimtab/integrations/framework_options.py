"""Options of frameworks that their plugins refuse, by name, and how a flag switches each plugin on. Needs no framework.

Options of Megatron that a framework hands on are in `megatron/option_tables.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.errors import InputError
from trimtab.integrations.megatron.option_tables import OFF, Option, names, refusals
from trimtab.integrations.options import PluginOptions
from trimtab.rank_variables import BALANCE

_UNRECORDED = "routes of MTP layers are not recorded, and the framework's replay fails on them or mixes up layers"
"""Why options are refused in all modes but `live`, which replays nothing. slime and miles have a queue for each router,
and not as many recorded layers; others number the routers that they find. `balance` alone leaves MTP layers to
Megatron."""
_WITHOUT_MTP = "train without MTP layers, or use mode=live"
MTP = Option("mtp_num_layers", (None, 0), _UNRECORDED, _WITHOUT_MTP)
_ADAPTERS = "adapters add Parameters to experts"
_WHOLE = "train without LoRA"
_LIVE = "leave it out, or use mode=live"
_UNCUT = "ROLL cuts tokens to the length of a micro-batch, and not their routes"

SLIME = (
    Option("enable_mtp_training", OFF, _UNRECORDED, _WITHOUT_MTP),
    Option(
        "megatron_deepgemm_forward_layers", (None, []), "it replaces the dispatcher of these layers", "leave it out"
    ),
)
MILES = (
    Option("enable_mtp_training", OFF, _UNRECORDED, _WITHOUT_MTP),
    Option("lora_rank", (None, 0), _ADAPTERS, _WHOLE),
    Option("lora_adapter_path", (None,), _ADAPTERS, _WHOLE),
    Option("multi_lora", OFF, _ADAPTERS, _WHOLE),
    Option("indep_dp", OFF, "a part of the data ranks may end and start again", "leave it out"),
)
ROLL = (Option("lora_target", (None,), _ADAPTERS, _WHOLE),)
ROLL_REPLAY = (
    Option("use_sequence_packing", OFF, "ROLL replays routes by padded row", _LIVE),
    Option("use_dynamic_batching_in_train", OFF, _UNCUT, _LIVE),
    Option("use_dynamic_batching_in_infer", OFF, _UNCUT, _LIVE),
    Option(
        "context_parallel_size",
        (None, 1),
        "ROLL replays the routes of all tokens on every rank",
        "set it to 1, or use mode=live",
    ),
)
"""Options of ROLL that are refused with recorded routing."""
VERL = (
    Option("dynamic_context_parallel", OFF, "its schedule cuts micro-batches in another way", "leave it out"),
    Option("use_fused_kernels", OFF, "not tested with replicas", "leave it out"),
    Option("use_megatron_fsdp", OFF, "home experts have to be whole Parameters on their rank", "leave it out"),
    Option("qat.enable", OFF, "replicas are not quantized", "leave it out"),
    Option("lora.rank", (None, 0), "replicas are made without adapters", "train whole weights"),
    Option("mtp.enable", OFF, _UNRECORDED, _WITHOUT_MTP),
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

MS_SWIFT = (
    Option("tuner_type", (None, "full"), _ADAPTERS, "use --tuner_type full"),
    Option("rlhf_type", (None, "grpo", "dpo", "gkd", "rm"), "it runs the model twice for a micro-batch", "use another"),
    Option("sequence_packing_scheduler", (None,), "its schedule cuts micro-batches in another way", "leave it out"),
)
MS_SWIFT_REPLAY = (
    Option("rlhf_type", ("grpo",), "ms-swift replays routing in GRPO alone", _LIVE),
    Option("padding_free", (None, True), "ms-swift gives routers the routes of padded rows in another order", _LIVE),
    Option("virtual_pipeline_model_parallel_size", (None, 1), "ms-swift gives routes to the first chunk alone", _LIVE),
    Option("cp_partition_mode", (None, "zigzag"), "ms-swift cuts routes for zigzag", "use zigzag, or mode=live"),
    Option("dsa_indexer_loss_coeff", (None, 0, 0.0), "its loss is over all tokens, and padding is rerouted", _LIVE),
)
"""Options of ms-swift that are refused with recorded routing."""
MS_SWIFT_RAY = tuple(
    Option(f"{kind}_parallel_size", (None, 1), "ms-swift's Ray workers train with the routes of all ranks", _LIVE)
    for kind in ("tensor_model", "pipeline_model", "context")
)
"""And with Ray too."""

SKYRL = (
    Option("trainer.policy.model.lora.rank", (None, 0), _ADAPTERS, _WHOLE),
    Option("trainer.policy.model.fake_int4_qat.enabled", OFF, "replicas are not quantized", "leave it out"),
    Option("trainer.mtp.enabled", OFF, _UNRECORDED, _WITHOUT_MTP),
)
SKYRL_REPLAY = (
    Option(
        "trainer.remove_microbatch_padding", (None, True),
        "SkyRL replays routes of padded sequences in another order than that of Megatron's tokens",
        _LIVE,
    ),
    Option(
        "trainer.policy.megatron_config.transformer_config_kwargs.virtual_pipeline_model_parallel_size", (None, 1),
        "SkyRL replays the routes of one chunk of the model", _LIVE,
    ),
)  # fmt: skip
"""Options of SkyRL that are refused with recorded routing."""


def read_options() -> PluginOptions:
    """The options of `BALANCE`. Raises InputError."""
    return PluginOptions.from_text(os.environ.get(BALANCE, ""), source=BALANCE)


def value_at(config: Any, path: str) -> Any:
    """The value at a dotted path of mappings and objects; None if it is not there."""
    for name in path.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return config


def raise_first(package: str, problems: Sequence[str]) -> None:
    """Raise InputError with the first problem, if there is one, and the number of others."""
    if problems:
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InputError(f"{package} can't be balanced: {problems[0]}{more}")


def refused(options: Sequence[Option], given: Mapping[str, Any], mode: str) -> list[str]:
    """Why given options can't be balanced in a mode, one line each."""
    return [
        f"{option.name}={given[option.name]} is not supported: {option.reason}; {option.remedy}"
        for option in options
        if option.name in given
        and given[option.name] not in option.supported
        and not (mode == "live" and option.reason == _UNRECORDED)
    ]


def megatron_refusals(mode: str, *parts: Mapping[str, Any] | None) -> list[str]:
    """Why options of Megatron in parts of a framework's config are refused in a mode, one line each."""
    known = names()
    given = {name: value for part in parts for name, value in (part or {}).items() if name in known or name == MTP.name}
    return [*refused([MTP], given, mode), *refusals(given).values()]


_SWITCHES = {
    "roll": "set actor_train.router_replay.mode=R3",
    "nemo_rl": "set policy.router_replay.enabled=true",
    "ms_swift": "add --router_replay_mode R3 (GRPO)",
    "skyrl": "set trainer.policy.megatron_config.moe_enable_routing_replay=true and "
    "generator.inference_engine.enable_return_routed_experts=true",
}
"""What gives a framework recorded routing, by package."""


def wrong_mode(package: str, mode: str, replays: bool) -> str:
    """Why a mode can't be used with or without recorded routing; empty if it can."""
    if mode == "live" and replays:
        return "mode=live balances what routers choose; with recorded routing use mode=plan"
    if mode not in ("live", "off") and not replays:
        switch = _SWITCHES.get(package, "add --use-rollout-routing-replay")
        return f"mode={mode} needs recorded routing; {switch}, or use mode=live"
    return ""
