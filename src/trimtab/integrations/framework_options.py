"""Options of frameworks that their plugins refuse, by name, and how a flag switches each plugin on. Needs no framework.

`framework_options.toml` has the tables. Options of Megatron that a framework hands on are in
`megatron/option_tables.py`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from trimtab.errors import InputError
from trimtab.integrations.megatron.option_tables import Option, names, options_of_table, refusals
from trimtab.integrations.options import PluginOptions
from trimtab.rank_variables import BALANCE

_UNRECORDED = "routes of MTP layers are not recorded, and the framework's replay fails on them or mixes up layers"
"""Why options are refused in all modes but `live`, which replays nothing. slime and miles have a queue for each router,
and not as many recorded layers; others number the routers that they find. `balance` alone leaves MTP layers to
Megatron."""
_WITHOUT_MTP = "train without MTP layers, or use mode=live"
MTP = Option("mtp_num_layers", (None, 0), _UNRECORDED, _WITHOUT_MTP)
TABLES = {
    name: options_of_table(table, {"unrecorded": (_UNRECORDED, _WITHOUT_MTP)})
    for name, table in tomllib.loads(
        files("trimtab.integrations").joinpath("framework_options.toml").read_text("utf-8")
    ).items()
}


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
