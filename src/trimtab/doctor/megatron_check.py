"""Check of a Megatron run: options of its file, what `trimtab.integrations.megatron` refuses, the path of the rest."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trimtab.doctor.finding import Finding
from trimtab.doctor.launch_script import expanded
from trimtab.errors import InputError
from trimtab.files import read_small_text
from trimtab.integrations.megatron.option_tables import (
    NEVER_RUN,
    OFF,
    REFUSED,
    immovable,
    never_run,
    refusals,
)

# Names of flags and their TransformerConfig field, where they differ.
FIELDS = {"num_experts": "num_moe_experts", "fp8_format": "fp8", "fp4_format": "fp4", "fp8_param_gather": "fp8_param"}
SWITCHES = {option.name for option in (*REFUSED, *NEVER_RUN) if option.supported == OFF} - {"fp8", "fp4"} | {
    "moe_enable_routing_replay", "overlap_grad_reduce", "overlap_param_gather", "sequence_parallel",
    "use_distributed_optimizer", "dist_ckpt_optim_fully_reshardable",
}  # fmt: skip
LISTS = ("cuda_graph_scope", "cuda_graph_modules", "moe_router_load_balancing_type", "recompute_modules")
LOG_LINE = re.compile(r"^\s*(?:\S+:\s*)?([a-z]\w*) \.{3,} ?(.*?)\s*$", re.MULTILINE)
FLAG = re.compile(r"--([a-zA-Z][\w-]*)(?:=(.*))?$")


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
    text = expanded(path)
    flags = list(_flags(text))
    named = {name for name, _ in flags}
    files = [pair for tree in named_configs(path, text) for pair in _leaves(tree) if pair[0] not in named]
    return [*files, *flags]


def named_configs(path: Path, text: str) -> Iterator[Any]:
    """Yields the contents of the YAML and JSON files that a script's command names, of those that are there.

    Hydra's `--config-path` and `--config-name` name one together. Others than those of a run, and those that can't be
    read, are left out.
    """
    folders = [match[1] for match in _CONFIG_FOLDER.finditer(text)]
    names = [f"{folder}/{name}.yaml" for folder in folders for name in _CONFIG_NAME.findall(text)]
    for name in dict.fromkeys([*names, *_CONFIG_FILE.findall(text)]):
        file = path.parent / name
        if "$" not in name and file.is_file():
            with suppress(InputError):  # Of another kind, or without PyYAML.
                yield read_tree(file)


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
    """Flags with their values, of a script without variables."""
    for line in re.sub(r"['\"()]", " ", text).splitlines():
        name, given = "", []
        for word in [*line.split(), "end="]:
            flag = FLAG.match(word)
            if flag is None and not re.match(r"\w+\+?=", word):
                given.append(word)
                continue
            if name:
                yield _flag(name, given)
            name = flag[1].replace("-", "_") if flag else ""
            given = [flag[2]] if flag and flag[2] else []


def _flag(name: str, words: list[str]) -> tuple[str, Any]:
    """A flag's value. Words behind a switch, or behind the one value of other flags, belong to the command."""
    if name.startswith("no_"):
        return name[3:], False
    if name in SWITCHES or not words:
        return name, True
    return name, words if name in LISTS else _literal(words[0])


_CONFIG_FILE = re.compile(
    r"""--(?:custom-|yaml-|train-)?(?:config|cfg)(?:-path|-file)?[= ]+["']?([^\s"']+\.(?:ya?ml|json))(?=["'\s]|$)"""
)
_CONFIG_FOLDER = re.compile(r"""--config-(?:path|dir)[= ]+["']?([^\s"']+)""")
_CONFIG_NAME = re.compile(r"""--config-name[= ]+["']?([^\s"']+?)(?:\.yaml)?(?=["'\s]|$)""")
TESTED = ("0.16.1", "0.18.2", "0.19.2")
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
    findings += [_gradients(values), _recompute(values), _routing(values), _renumbering(values)]
    findings += [Finding(f"megatron {name}", "warning", text) for name, text in never_run(values).items()]
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


def _renumbering(values: Mapping[str, Any]) -> Finding:
    name = "megatron renumbering"
    problems = immovable(values)
    if problems:
        text = "; ".join(problems.values())
        return Finding(name, "warning", f"in a run it is refused: {text}; checkpoints can be renumbered")
    return Finding(name, "ok", "in a run after register_optimizer(), with the optimizer's state; or of a checkpoint")


def _routing(values: Mapping[str, Any]) -> Finding:
    if values.get("moe_enable_routing_replay"):
        return Finding("megatron routing", "ok", "replayed by the session in planned steps, else by your RouterReplay")
    return Finding("megatron routing", "ok", "replayed by the session in planned steps, else the router's own")
