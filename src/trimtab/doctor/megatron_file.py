"""`read_options`: the options of Megatron-core in a file that users have: JSON, YAML, a log, or a script of flags."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trimtab.errors import InputError
from trimtab.files import read_small_text
from trimtab.integrations.megatron.option_tables import NEVER_RUN, OFF, REFUSED

# Names of flags and their TransformerConfig field, where they differ.
FIELDS = {"num_experts": "num_moe_experts", "fp8_format": "fp8", "fp4_format": "fp4", "fp8_param_gather": "fp8_param"}
SWITCHES = {option.name for option in (*REFUSED, *NEVER_RUN) if option.supported == OFF} - {"fp8", "fp4"} | {
    "moe_enable_routing_replay", "overlap_grad_reduce", "overlap_param_gather", "sequence_parallel",
    "moe_use_grouped_tensor", "use_distributed_optimizer", "dist_ckpt_optim_fully_reshardable",
}  # fmt: skip
LISTS = ("cuda_graph_scope", "cuda_graph_modules", "moe_router_load_balancing_type", "recompute_modules")
LOG_LINE = re.compile(r"^\s*(?:\S+:\s*)?([a-z]\w*) \.{3,} ?(.*?)\s*$", re.MULTILINE)
FLAG = re.compile(r"--([a-zA-Z][\w-]*)(?:=(.*))?$")
ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=([^\s(]+)\s*$", re.MULTILINE)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


def read_options(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The options in a file by their name in Megatron's configurations, and the names whose value is a variable.

    Args:
        path: JSON or YAML of options, nested as it may be; the arguments that Megatron prints into its log; or a text
            with command-line flags, such as a shell script. Names may have dashes or underscores.

    Raises:
        InputError: if the file can't be read, or has no options.
    """
    values = flat_options(_pairs(path, read_small_text(path)))
    if not values:
        raise InputError(
            f"{path}: no options found; it should be JSON or YAML of Megatron's arguments, its log, or a script"
        )
    unknown = sorted(name for name, value in values.items() if "$" in str(value))
    return {name: value for name, value in values.items() if name not in unknown}, unknown


def flat_options(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Options by their name in Megatron's configurations. If several parts of a nested configuration have one, a value
    that is switched on counts.
    """
    values: dict[str, Any] = {}
    for name, value in pairs:
        field = FIELDS.get(name, name)
        if value not in (None, False, "") or field not in values:
            values[field] = value
    return values


def read_tree(path: Path) -> Any:
    """The content of a YAML or JSON file. Raises InputError if it can't be read."""
    text = read_small_text(path)
    if path.suffix in (".yaml", ".yml"):
        return _yaml(path, text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error})") from error


def _pairs(path: Path, text: str) -> Iterable[tuple[str, Any]]:
    if path.suffix in (".yaml", ".yml", ".json") or text.lstrip().startswith("{"):
        return _leaves(read_tree(path))
    if len(LOG_LINE.findall(text)) > 2:
        return ((match[1], _literal(match[2])) for match in LOG_LINE.finditer(text))
    return _flags(text)


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise InputError(f"{path}: YAML needs PyYAML; pip install pyyaml, or give JSON") from error

    class Loader(yaml.SafeLoader):
        """Objects of Python have no value."""

    Loader.add_multi_constructor("", lambda *_: None)
    try:
        return yaml.load(text, Loader)  # A SafeLoader.
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path}: not YAML ({str(error).splitlines()[0]})") from error


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            if isinstance(value, dict):
                yield from _leaves(value)
            elif not isinstance(value, list) or not any(isinstance(each, dict) for each in value):
                yield str(name).lstrip("-").replace("-", "_"), value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _flags(text: str) -> Iterator[tuple[str, Any]]:
    """Flags with their values."""
    text = re.sub(r"(?m)(^|\s)#.*$", "", text)
    variables: dict[str, str] = {}
    for match in ASSIGNMENT.finditer(text):
        variables[match[1]] = _expand(match[2].strip("'\""), variables)
    for line in re.sub(r"\\\n|['\"()]", " ", text).splitlines():
        name, given = "", []
        for word in [*line.split(), "end="]:
            flag = FLAG.match(word)
            if flag is None and not re.match(r"\w+\+?=", word):
                given.append(_expand(word, variables))
                continue
            if name:
                yield _flag(name, given)
            name = flag[1].replace("-", "_") if flag else ""
            given = [_expand(flag[2], variables)] if flag and flag[2] else []


def _flag(name: str, words: list[str]) -> tuple[str, Any]:
    """A flag's value. Words behind a switch, or behind the one value of other flags, belong to the command."""
    if name.startswith("no_"):
        return name[3:], False
    if name in SWITCHES or not words:
        return name, True
    return name, words if name in LISTS else _literal(words[0])


def _expand(word: str, variables: dict[str, str]) -> str:
    """A word with the values of the shell's variables that the text assigns."""
    for _ in range(8):  # Values of variables may be variables.
        expanded = VARIABLE.sub(lambda match: variables.get(match[1] or match[3], match[2] or match[0]), word)
        if expanded == word:
            break
        word = expanded
    return word
