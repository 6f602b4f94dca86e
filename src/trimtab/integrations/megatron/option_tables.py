"""Options of Megatron-core by name: those that are refused, and those that no run has reached. Needs no Megatron.

The names are those of TransformerConfig, DistributedDataParallelConfig and OptimizerConfig; they mean the same in all
of them. Names that only newer versions have are among them. `options.toml` has the tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from enum import Enum
from importlib.resources import files
from typing import Any, NamedTuple


class Option(NamedTuple):
    """An option and its values that are supported.

    Attributes:
        name: of the option.
        supported: its values that are supported.
        reason: why others are not.
        remedy: what to do.
    """

    name: str
    supported: tuple[Any, ...]
    reason: str
    remedy: str


OFF = (None, False)


def options_of_table(table: Mapping[str, Any], reasons: Mapping[str, tuple[str, str]] = {}) -> tuple[Option, ...]:
    """The options of a table of `options.toml` or `framework_options.toml`.

    Args:
        reasons: reason and remedy of rows that name their reason.
    """
    return tuple(
        Option(
            name, (*([None] if row.get("unset", True) else []), *row.get("supported", [False])),
            *reasons.get(row["reason"], (row["reason"], row.get("remedy", ""))),
        )
        for name, row in table.items()
    )  # fmt: skip


_TABLES: dict[str, Any] = tomllib.loads(files(__package__).joinpath("options.toml").read_text("utf-8"))
REFUSED, NEVER_RUN, IMMOVABLE = (options_of_table(_TABLES[n]) for n in ("refused", "never_run", "immovable"))
UNKNOWN: dict[str, str] = _TABLES["unknown"]

_OFFLOADS_OF_EXPERTS = {"expert_fc1", "moe_act", "fused_group_mlp"}
_GRAPH_MODULES_OUTSIDE = {"attn", "mlp", "mamba"}


def names() -> set[str]:
    """All names that `refusals` and `never_run` read."""
    joint = {
        "tensor_model_parallel_size", "enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope",
        "cuda_graph_modules", "moe_router_load_balancing_type", "optimizer", "offload_modules",
    }  # fmt: skip
    return joint | {option.name for option in (*REFUSED, *NEVER_RUN)}


def options_of(config: Any) -> dict[str, Any]:
    """The options that `refusals` and `never_run` read, of a config or arguments that have some of them."""
    return {name: getattr(config, name) for name in sorted(names()) if hasattr(config, name)}


def refusals(values: Mapping[str, Any]) -> dict[str, str]:
    """Why options can't be balanced, one line each, by name.

    Args:
        values: the options that are known; others have a value that is supported.
    """
    found = {}
    for option in REFUSED:
        value = values.get(option.name)
        if value not in option.supported and not (option.name in _MAY_BE_NEGATIVE and _is_negative(value)):
            found[option.name] = _line(option.name, value, option.reason, option.remedy)
    for problem in (_expert_tensor, _cuda_graphs, _own_topk, _offloading):
        found |= problem(values)
    return found


def never_run(values: Mapping[str, Any]) -> dict[str, str]:
    """Which options are allowed but have never run with Trimtab, one line each, by name."""
    found = {
        option.name: f"{option.name}={_text(value)} has never run with Trimtab: {option.reason}"
        for option in NEVER_RUN
        if (value := values.get(option.name)) not in option.supported
    }
    if values.get("moe_token_dispatcher_type") == "flex":
        name = "moe_token_dispatcher_type"
        found[name] = f"{name}=flex has never run with Trimtab: DeepEP and HybridEP need GPUs"
    optimizer = values.get("optimizer")
    if isinstance(optimizer, str) and optimizer not in ("adam", "sgd"):
        found["optimizer"] = f"optimizer={optimizer} has never run with Trimtab: only adam and sgd have"
    if "global_aux_loss" in _as_list(values.get("moe_router_load_balancing_type")):
        found["moe_router_load_balancing_type"] = "global_aux_loss has never run with Trimtab: no test has it"
    if _graph_impl(values)[1] and "cuda_graph_impl" not in refusals(values):
        found["cuda_graph_impl"] = "CUDA graphs outside of MoE layers have never run with Trimtab: they need a GPU"
    return found


def immovable(values: Mapping[str, Any]) -> dict[str, str]:
    """Which options keep the ids of experts in a run, one line each, by name."""
    return {
        option.name: f"{option.name}={_text(value)}: {option.reason}; {option.remedy}"
        for option in IMMOVABLE
        if (value := values.get(option.name)) not in option.supported
    }


_MAY_BE_NEGATIVE = ("moe_expert_capacity_factor",)  # A negative factor is none.


def _is_negative(value: Any) -> bool:
    return isinstance(value, int | float) and value < 0


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(each) for each in value)}]"
    return str(value)


def _line(name: str, value: Any, reason: str, remedy: str) -> str:
    return f"{name}={_text(value)} is not supported: {reason}; {remedy}"


def _as_list(value: Any) -> list[str]:
    """The words of an option with one or several, which may be members of an Enum."""
    if value is None:
        return []
    several: Iterable[Any] = value.split(",") if isinstance(value, str) else value
    if isinstance(value, Enum):
        several = [value]
    return [_text(each).strip() for each in several]


def _expert_tensor(values: Mapping[str, Any]) -> dict[str, str]:
    name = "expert_tensor_parallel_size"
    tensor = values.get("tensor_model_parallel_size")
    if name in values and values[name] is None and tensor not in (None, 1):
        reason = f"it then is tensor_model_parallel_size, {tensor}, and a replica is a whole expert on one rank"
        return {name: _line(name, None, reason, "set it to 1")}
    return {}


def _graph_impl(values: Mapping[str, Any]) -> tuple[str, Any]:
    """The option that switches CUDA graphs on, and its value; None if they are off."""
    for name in ("enable_cuda_graph", "external_cuda_graph"):
        if values.get(name):
            return name, values[name]
    impl = values.get("cuda_graph_impl")
    return "cuda_graph_impl", None if impl in (None, False, "none") else impl


def _cuda_graphs(values: Mapping[str, Any]) -> dict[str, str]:
    name, impl = _graph_impl(values)
    if not impl:
        return {}
    modules = _as_list(values.get("cuda_graph_modules")) or _as_list(values.get("cuda_graph_scope"))
    if impl != "full_iteration" and modules and _GRAPH_MODULES_OUTSIDE.issuperset(modules):
        return {}
    scope = _text(modules) if modules else "the whole layer"
    reason = f"its scope, {scope}, includes MoE layers, whose calls differ between micro-batches"
    return {"cuda_graph_impl": _line(name, impl, reason, "set cuda_graph_scope to attn, or cuda_graph_impl to none")}


def _offloading(values: Mapping[str, Any]) -> dict[str, str]:
    name = "offload_modules"
    modules = _as_list(values.get(name))
    if values.get("fine_grained_activation_offloading") and not _OFFLOADS_OF_EXPERTS.isdisjoint(modules):
        return {
            name: _line(name, modules, "it counts the products of experts, and replicas add some", "leave them out")
        }
    return {}


def _own_topk(values: Mapping[str, Any]) -> dict[str, str]:
    name = "moe_router_load_balancing_type"
    kinds = _as_list(values.get(name))
    if not {"sinkhorn", "quantile_balancing"}.isdisjoint(kinds):
        return {name: _line(name, kinds, "its router can't replay recorded routing", "use none or aux_loss")}
    return {}
