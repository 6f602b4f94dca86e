"""`trimtab init`, and `--settings FILE` of the commands that read it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import trimtab
from trimtab import InputError, Run
from trimtab.cli.main import main, make_parser
from trimtab.cli.settings import COMMANDS, apply_settings, known_settings
from trimtab.cli.signatures import given

Command = Callable[..., str]
DEFAULTS = {field.name: field.default for field in fields(Run)}


def arguments(command: str, path: Path, *words: str) -> dict[str, Any]:
    """What the function of a command is called with, but for the trace."""
    options = make_parser([command]).parse_args([command, "t.parquet", "--settings", str(path), *words])
    apply_settings(options)
    found = given(options, Run) | given(options, function_of(command))
    return {key: value for key, value in found.items() if key != "trace"}


def function_of(command: str) -> Any:
    return getattr(trimtab, {"rollout": "size_rollout"}.get(command, command))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "run.toml").write_text(text)
        return tmp_path / "run.toml"

    return write


def test_init_writes_a_file_that_every_command_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made" / "run.toml"
    assert main(["init", "-o", str(path)]) == 0
    assert f"settings: {path}" in capsys.readouterr().err
    text = path.read_text()
    # What is set holds without the file, too.
    for command in COMMANDS:
        function = function_of(command)
        for key, value in arguments(command, path).items():
            default = DEFAULTS.get(key) or function.__kwdefaults__[key]
            assert value in (default, (default,))
    # Every example is valid.
    keys = re.findall(r"^(?:# )?(\w+) = ", text, re.MULTILINE)
    assert {"cluster", "model", "ranks", "ranks_per_node", "groups", "slots", "dispatcher", "gpu_hour"} <= set(keys)
    for key in keys:
        line = re.findall(rf"^(?:# )?({key} = .*)$", text, re.MULTILINE)
        path.write_text("\n".join(line))
        taken = [arguments(command, path) for command in COMMANDS]
        assert sum(key in each for each in taken) >= 1
    assert main(["init", "-o", str(path)]) == 2
    assert f"{path}: exists already" in capsys.readouterr().err
    assert path.read_text() == "\n".join(line)


def test_keys_are_the_options_of_the_commands(write: Callable[[str], Path]) -> None:
    path = write(
        'model = "qwen3-30b-a3b"\nranks = 8\nslots = 1\nmicro_steps = 4\nstep_tokens = "2M"\ndispatcher = "tokens"\n'
        'recompute = false\ngpu_hour = 2\nset = ["vocab_size=5"]\n'
    )
    common = {"model": "qwen3-30b-a3b", "micro_steps": 4, "overrides": (("vocab_size", 5),), "recompute": False}
    assert arguments("analyze", path) == common | {"ranks": 8, "step_tokens": 2_000_000, "dispatcher": "tokens"}
    assert arguments("plan", path) == common | {"ranks": 8, "slots": 1, "dispatcher": "tokens"}
    assert arguments("advise", path, "--gpu-hour", "0")["gpu_hour"] == 0
    both = {"step_tokens": 2_000_000}
    assert arguments("advise", path) == common | both | {
        "ranks": 8, "slots": 1, "dispatcher": "tokens", "gpu_hour": 2.0,
    }  # fmt: skip
    sweep = common | both | {"ranks": (8,), "slots": (1,), "micro_steps": (4,), "dispatcher": ("tokens",)}
    assert arguments("simulate", path) == sweep


def test_options_on_the_command_line_win(write: Callable[[str], Path]) -> None:
    path = write('ranks = [8, 16]\nmicro_steps = 4\nsampled = 0.5\nrecompute_granularity = "full"\n')
    found = arguments("simulate", path, "--ranks", "4", "--token-budget", "512", "--step-tokens", "9k")
    assert found == {"ranks": (4,), "token_budget": 512, "step_tokens": 9000, "recompute_granularity": "full"}
    assert arguments("simulate", path)["ranks"] == (8, 16)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank = 8", "unknown key 'rank'; did you mean ranks?"),
        ("json = 'out.json'", "unknown key 'json'; "),
        ("[step]\nmicro_steps = 8", "step: {'micro_steps': 8} should be a whole number"),
        ("ranks = '8'", "ranks: '8' should be a whole number"),
        ("ranks = 8.0", "ranks: 8.0 should be a whole number"),
        ("ranks = true", "ranks: True should be a whole number"),
        ("ranks = 0", "ranks: '0' should be a whole number of at least 1"),
        ("ranks = []", "ranks: [] should be "),
        ("groups = [1, 2]", "groups: [1, 2] should be one value"),
        ("step_tokens = 'many'", "step_tokens: 'many' should be a number of tokens, such as 20M"),
        ("sampled = 2", "sampled: '2' should be above 0, and at most 1"),
        ("gpu_hour = nan", "gpu_hour: 'nan' should be a price, 0 or more"),
        ("gpu_hour = -1", "gpu_hour: '-1' should be a price, 0 or more"),
        ("cluster = 'h100x9'", "cluster: unknown cluster h100x9; did you mean h100x8?"),
        ("dispatcher = 'token'", "dispatcher: unknown 'token'; did you mean tokens?"),
        ("recompute = 1", "recompute: 1 should be true or false"),
        ("micro_steps = 4\ntoken_budget = 8192", "micro_steps and token_budget: one excludes the other; remove one"),
        ("ranks = ", "not a TOML file (Invalid value"),
    ],
)
def test_mistakes_are_one_line(
    command: str, text: str, message: str, write: Callable[[str], Path], trace_file: Path, error_of: Command
) -> None:
    if command == "rollout" and "excludes" in message:
        pytest.skip("it has no micro-steps")
    path = write(text)
    error = error_of(command, trace_file, "--settings", path)
    assert error.startswith(f"trimtab {command}: {path}: {message}")


def test_a_missing_file_is_one_line(tmp_path: Path, trace_file: Path, error_of: Command) -> None:
    error = error_of("plan", trace_file, "--settings", tmp_path / "absent.toml")
    assert error == f"trimtab plan: {tmp_path / 'absent.toml'}: no such file; trimtab init writes one\n"


def test_layouts_and_prices_are_keys_of_all_commands() -> None:
    assert {"cluster", "model", "ranks", "groups", "dispatcher", "step_tokens", "gpu_hour"} <= known_settings().keys()
    assert not {"json", "html", "settings", "help", "log_level", "trace"} & known_settings().keys()


def test_commands_use_the_file(write: Callable[[str], Path], trace_file: Path, printed: Command) -> None:
    path = write("ranks = 4\ntoken_budget = 64\nslots = 1\n")
    for command in ("plan", "analyze"):
        assert "4 ranks" in " ".join(printed(command, trace_file, "--settings", path).split()), command


def test_an_odd_file_is_no_settings(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a regular file"):
        arguments("plan", tmp_path)


def test_the_file_is_not_overwritten(write: Callable[[str], Path], trace_file: Path, error_of: Command) -> None:
    path = write("ranks = 4")
    assert f"{path}: to be read and written" in error_of("plan", trace_file, "--settings", path, "--json", path)
    assert path.read_text() == "ranks = 4"
