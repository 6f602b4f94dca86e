"""Checks of a verl, slime or miles run before it is queued: is the plugin switched on, and what would it refuse?"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from trimtab.doctor.finding import Finding
from trimtab.doctor.launch_script import expanded
from trimtab.doctor.megatron_check import check_options, flat_options, named_configs, read_options, read_tree
from trimtab.errors import InputError
from trimtab.files import read_small_text
from trimtab.integrations.framework_options import MTP, TABLES, refused, wrong_mode
from trimtab.integrations.megatron.option_tables import Option
from trimtab.integrations.options import PluginOptions
from trimtab.rank_variables import BALANCE

# Of slime and miles, in JSON or set in the shell: {"TRIMTAB_BALANCE": "mode=plan"}, export TRIMTAB_BALANCE='mode=plan'.
_BALANCE = re.compile(BALANCE + r"""\W*?[:=]\W*((?:\w+=\w+\s*)*)""")
_SETTING = re.compile(r"""(?<![\w.-])\+{0,2}([a-z_]\w*(?:\.\w+)+)=("[^"]*"|'[^']*'|[^\s"'\\]*)""")
_REPLAYS = ("use_rollout_routing_replay", "use_routing_replay")
_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_ENGINE = f"{_ACTOR}.megatron"
_VERL_PLACES = {"lora.rank": _MODEL, "mtp.enable": _MODEL, "use_fused_kernels": _MODEL}


def check_slime(path: Path) -> list[Finding]:
    """Check the arguments of a slime run, in a script or another file that `read_options` knows.

    Raises:
        InputError: if the file can't be read, or has no options.
    """
    return _check_arguments(path, "slime", TABLES["slime"])


def check_miles(path: Path) -> list[Finding]:
    """As `check_slime`, of a miles run."""
    return _check_arguments(path, "miles", TABLES["miles"])


def check_verl(path: Path) -> list[Finding]:
    """Check the config of a verl run: YAML, as verl and hydra write it, or a script with its settings.

    Raises:
        InputError: if the file can't be read, or has no setting of verl.
    """
    given = _verl_settings(path)
    unknown = sorted(name for name, value in given.items() if "$" in str(value))
    given = {name: value for name, value in given.items() if name not in unknown}
    findings = [_verl_flag(given, unknown)]
    engine_name = given.get("model_engine") or given.get(f"{_ACTOR}.strategy", "megatron")
    if engine_name != "megatron":
        text = f"the engine is {engine_name}, which has no expert parallelism: there is nothing to balance"
        return [*findings, Finding("verl engine", "problem", text)]
    mode = "plan"
    try:
        values = {
            name.rpartition(".")[2]: value
            for name, value in given.items()
            if name.startswith(f"{_ENGINE}.override_mcore_model_config.trimtab.")
        }
        options = PluginOptions.from_mapping(values, source="trimtab's options")
        mode = options.mode
        findings.append(Finding("verl options", "ok", f"mode={options.mode} slots_per_rank={options.slots_per_rank}"))
        findings += _verl_replay(given, options.mode)
    except InputError as error:
        findings.append(Finding("verl options", "problem", str(error)))
    of_plugin = {
        option.name: given.get(f"{_VERL_PLACES.get(option.name, _ENGINE)}.{option.name}") for option in TABLES["verl"]
    }
    findings += [Finding("verl options", "problem", text) for text in refused(TABLES["verl"], of_plugin, mode)]
    engine = {
        name.rpartition(".")[2]: value
        for name, value in given.items()
        if name.startswith(f"{_ENGINE}.") and ".trimtab." not in name
    }
    engine.setdefault("sequence_parallel", True)
    # verl builds the model with it, unless it is overridden.
    engine.setdefault("moe_token_dispatcher_type", "alltoall")
    # Those that matter here are named with those of Megatron.
    mine = [name for name in unknown if name.startswith(_ENGINE) or name.rpartition(".")[2] in of_plugin]
    return findings + check_options(flat_options(engine.items()), [name.rpartition(".")[2] for name in mine])


def _check_arguments(path: Path, package: str, options: tuple[Option, ...]) -> list[Finding]:
    values, unknown = read_options(path)
    hook = f"trimtab.integrations.{package}.install"
    findings = [_hook(package, values.get("custom_megatron_init_path"), hook)]
    words = " ".join(match[1].strip() for match in _BALANCE.finditer(read_small_text(path)))
    mode = "plan"
    try:
        given = PluginOptions.from_text(words, source=BALANCE)
        mode = given.mode
        wrong = wrong_mode(package, mode, any(values.get(name) for name in _REPLAYS))
        state = f"mode={mode} slots_per_rank={given.slots_per_rank}" + ("" if words else ", the default")
        findings.append(Finding(f"{package} options", "problem" if wrong else "ok", wrong or state))
    except InputError as error:
        findings.append(Finding(f"{package} options", "problem", str(error)))
    findings += [Finding(f"{package} options", "problem", text) for text in refused((*options, MTP), values, mode)]
    if values.get("offload_train"):
        text = "it has never run with Trimtab: it needs a GPU and torch_memory_saver"
        findings.append(Finding(f"{package} offload_train", "warning", text))
    # These frameworks renumber checkpoints alone, and routing is replayed by the plugin.
    of_megatron = check_options(values, unknown)
    return findings + [each for each in of_megatron if each.name not in ("megatron renumbering", "megatron routing")]


def _hook(package: str, found: Any, expected: str) -> Finding:
    name = f"{package} plugin"
    if found == expected:
        return Finding(name, "ok", f"switched on by --custom-megatron-init-path {expected}")
    now = f"it is {found}" if found else "it is not in the file"
    return Finding(name, "problem", f"not switched on: --custom-megatron-init-path should be {expected}; {now}")


def _verl_flag(given: Mapping[str, Any], unknown: Collection[str]) -> Finding:
    name, expected = f"{_MODEL}.external_lib", "trimtab.integrations.verl"
    if name in unknown:
        return Finding("verl plugin", "warning", f"{name} has a value that is not in the file; it should be {expected}")
    if given.get(name) == expected:
        return Finding("verl plugin", "ok", f"switched on by {name}={expected}")
    now = f"it is {given[name]}" if given.get(name) else "it is not in the file"
    return Finding("verl plugin", "problem", f"not switched on: {name} should be {expected}; {now}")


def _verl_replay(given: Mapping[str, Any], mode: str) -> Iterator[Finding]:
    replay = given.get(f"{_ENGINE}.router_replay.mode") or "disabled"
    if replay == "disabled" and mode not in ("live", "off"):
        text = f"mode={mode} needs recorded routing; set {_ENGINE}.router_replay.mode=R3, or use mode=live"
        yield Finding("verl router_replay", "problem", text)
    elif replay == "R3" and not given.get("actor_rollout_ref.rollout.enable_rollout_routing_replay"):
        text = "R3 needs actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
        yield Finding("verl router_replay", "problem", text)
    else:
        yield Finding("verl router_replay", "ok", str(replay))


def _verl_settings(path: Path) -> dict[str, Any]:
    """Settings by their names with dots."""
    if path.suffix in (".yaml", ".yml", ".json"):
        tree = read_tree(path)
        given = dict(_dotted(tree)) if isinstance(tree, dict) else {}
    else:
        text = expanded(path)
        trees = [tree for tree in named_configs(path, text) if isinstance(tree, dict)]
        given = {name: value for tree in trees for name, value in _dotted(tree)}
        given |= {name: _value(value) for name, value in _SETTING.findall(text)}
        if engine := re.search(r"(?<![\w.-])model_engine=(\w+)", text):
            given["model_engine"] = engine[1]
    if not any(name.startswith("actor_rollout_ref.") for name in given):
        raise InputError(
            f"{path}: no setting of actor_rollout_ref; it should be verl's config, or a script of settings"
        )
    return given


def _dotted(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _value(text: str) -> Any:
    """A value as hydra reads it, of those that options have."""
    words = {"true": True, "false": False, "null": None, "none": None}
    text = text.strip("\"'")
    if text.lower() in words:
        return words[text.lower()]
    return int(text) if re.fullmatch(r"-?\d+", text) else text
