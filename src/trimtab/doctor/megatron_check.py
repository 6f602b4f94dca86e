"""Check of a Megatron configuration: what `trimtab.integrations.megatron` refuses, and which path the rest takes."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.doctor.finding import Finding
from trimtab.doctor.megatron_file import read_options
from trimtab.integrations.megatron.option_tables import RANK_CAPACITY, immovable, never_run, refusals

TESTED = ("0.16.1", "0.18.2", "0.19.2")
RESHARDABLE = "dist_ckpt_optim_fully_reshardable"
SIZES = {
    "EP": "expert_model_parallel_size",
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "CP": "context_parallel_size",
}


def check_megatron(path: Path) -> list[Finding]:
    """Check the options in a file; see `read_options`. Needs neither Megatron nor a process group.

    Raises:
        InputError: if the file can't be read, or has no options.
    """
    return check_options(*read_options(path))


def check_options(values: dict[str, Any], unknown: list[str]) -> list[Finding]:
    """Check options by their names in Megatron's configurations.

    Args:
        unknown: names of those whose value is a variable.
    """
    values = {"transformer_impl": "transformer_engine"} | values
    findings = [_package()]
    refused = refusals(values)
    findings += [Finding(f"megatron {name}", "problem", text) for name, text in refused.items()]
    findings += _layout(values, unknown)
    if not refused.keys() & {"moe_token_dispatcher_type"}:
        findings.append(_dispatcher(values))
    findings += [_gradients(values), _recompute(values), _routing(values), _moves(values)]
    findings += [Finding(f"megatron {name}", "warning", text) for name, text in never_run(values).items()]
    if values.get(RANK_CAPACITY) and RANK_CAPACITY not in refused:
        text = (
            f"{RANK_CAPACITY}={values[RANK_CAPACITY]} needs exact=True or max_rows_per_rank in balance(), in mode plan"
        )
        findings.append(Finding(f"megatron {RANK_CAPACITY}", "warning", text))
    if unknown:
        text = f"{', '.join(unknown)} have values that are not in the file; write them there to check them"
        findings.append(Finding("megatron variables", "warning", text))
    return findings


def _package() -> Finding:
    name = "megatron-core"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        text = f"not installed here: options are checked by name; balance() needs it, pip install {name}=={TESTED[0]}"
        return Finding(name, "warning", text)
    if version not in TESTED:
        return Finding(name, "warning", f"{version}; the tests run with {', '.join(TESTED)}")
    return Finding(name, "ok", version)


def _layout(values: Mapping[str, Any], unknown: list[str]) -> list[Finding]:
    size = {name: "?" if field in unknown else values.get(field) or 1 for name, field in SIZES.items()}
    chunks = values.get("virtual_pipeline_model_parallel_size") or values.get("num_virtual_stages_per_pipeline_rank")
    interleaved = chunks or values.get("num_layers_per_virtual_pipeline_stage")
    schedule = "no pipeline" if size["PP"] == 1 else "interleaved 1F1B" if interleaved else "1F1B"
    text = f"{', '.join(f'{name} {number}' for name, number in size.items())}; schedule: {schedule}"
    findings = [Finding("megatron layout", "ok", text)]
    if size["TP"] != 1 and not values.get("sequence_parallel"):
        text = "Megatron trains MoE layers under tensor parallelism only with it; set sequence_parallel"
        findings.append(Finding("megatron sequence_parallel", "problem", text))
    if size["TP"] != 1 and "expert_tensor_parallel_size" not in values:
        text = f"not in the file, so it is that of TP, {size['TP']}, which is refused; set it to 1"
        findings.append(Finding("megatron expert_tensor_parallel_size", "problem", text))
    return [*findings, _experts(values.get("num_moe_experts"), size["EP"])]


def _experts(experts: Any, ranks: Any) -> Finding:
    name = "megatron experts"
    if not isinstance(experts, int) or not isinstance(ranks, int):
        return Finding(name, "warning", "num_moe_experts or the expert parallelism is not in the file")
    if ranks < 2:
        return Finding(name, "problem", "expert_model_parallel_size is 1; experts are shared by 2 or more ranks")
    if experts % ranks:
        return Finding(name, "problem", f"{ranks} ranks don't divide {experts} experts; change the expert parallelism")
    return Finding(name, "ok", f"{experts // ranks} of {experts} experts a rank; their Parameters stay Megatron's")


def _dispatcher(values: Mapping[str, Any]) -> Finding:
    if "moe_token_dispatcher_type" not in values:
        text = "not in the file, so it is Megatron's default, allgather, which is refused; set it to alltoall"
        return Finding("megatron moe_token_dispatcher_type", "warning", text)
    return Finding("megatron dispatcher", "ok", "Megatron's all-to-all, built for home experts and replica slots")


def _gradients(values: Mapping[str, Any]) -> Finding:
    options = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    used = [option for option in options if values.get(option)]
    text = "those of replicas are added to main_grad before its bucket is reduced"
    return Finding("megatron gradients", "ok", f"{text}; {', '.join(used)}" if used else text)


def _recompute(values: Mapping[str, Any]) -> Finding:
    granularity = values.get("recompute_granularity")
    words = [granularity, values.get("recompute_method") if granularity == "full" else values.get("recompute_modules")]
    text = " ".join(str(word) for word in words if word) if granularity else "none"
    return Finding("megatron recompute", "ok", f"{text}; recomputed layers keep their plan")


def _moves(values: Mapping[str, Any]) -> Finding:
    name = "megatron moves"
    problems = immovable(values)
    if problems:
        return Finding(name, "warning", f"register_optimizer refuses {'; '.join(problems.values())}")
    text = "experts move with the state of their optimizer, once it is registered"
    if values.get("ckpt_format") == "torch":
        more = "ckpt_format=torch stores them by position; use torch_dist, or call return_home() before each save"
        return Finding(name, "warning", f"{text}; {more}")
    if values.get("use_distributed_optimizer") and not values.get(RESHARDABLE):
        text += f"; checkpoints in dp_reshardable bring them home before each save, those of {RESHARDABLE} do not"
    return Finding(name, "ok", text)


def _routing(values: Mapping[str, Any]) -> Finding:
    if values.get("moe_enable_routing_replay"):
        return Finding("megatron routing", "ok", "replayed by the session in planned steps, else by your RouterReplay")
    return Finding("megatron routing", "ok", "replayed by the session in planned steps, else the router's own")
