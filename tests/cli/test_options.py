"""All commands: the form of their help, options that they share, closest matches, `--json -`, `-q` and `-v`."""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.harness import make_parser, run_command
from benchmarks.runtime import RuntimeBenchmark
from trimtab.cli.main import COMMANDS, main
from trimtab.cli.options import SHARED
from trimtab.cli.parser import ALIASES, Parser
from trimtab.trace import synthesize, write_trace

# These start commands, or import files in another process.
pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FIGURES = BENCHMARKS.parent / "docs" / "benchmarks" / "papers.json"
# Options without a value when not given: files to write or read.
FILES = {"--output", "--json", "--html", "--perfetto", "--frontier", "--page", "--picture", "--read", "--figures"}

EXPERIMENTS = (
    "experiments.papers.__main__", "experiments.presets.__main__", "experiments.planning_times",
    "experiments.simulator_validation",
)  # fmt: skip

Command = Callable[..., str]


def all_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of all commands and of their parts, by program name."""
    top = Parser(prog="trimtab")
    commands = top.add_subparsers()
    for command in COMMANDS:
        import_module(f"trimtab.cli.{command}").add(commands)
    found: dict[str, argparse.ArgumentParser] = {}

    def walk(parser: argparse.ArgumentParser) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for child in action.choices.values():
                    found[child.prog] = child
                    walk(child)

    walk(top)
    benchmarks = [f"benchmarks.{file.stem}" for file in BENCHMARKS.glob("*.py") if "def add_to" in file.read_text()]
    beside = [*sorted(benchmarks), *EXPERIMENTS]
    return found | {parser.prog: parser for parser in map(make_parser, beside)}


PARSERS = all_parsers()


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.option_strings[-1]: action for action in parser._actions if action.option_strings}


@pytest.mark.parametrize("name", PARSERS)
def test_help_has_examples_and_defaults(name: str) -> None:
    parser = PARSERS[name]
    text = parser.format_help()
    example = text.split("\nexamples:\n")[1].splitlines()[0]
    assert re.match(r"  (trimtab|python -m (benchmarks|experiments)\.)", example)
    for option, action in options_of(parser).items():
        if action.nargs == 0:
            continue
        assert action.metavar in ("N", "X", "NAME", "FILE", "FOLDER", "SIZE", "KEY=VALUE"), option
        if not action.required and option not in FILES:
            assert re.search(r" \(default: .+\)$", action.help or ""), option


def test_shared_options_are_the_same_in_all_commands() -> None:
    used = set()
    for name, parser in PARSERS.items():
        for option, action in options_of(parser).items():
            # An import has a model and steps of its own.
            if option in SHARED and (option, name) != ("--model", "trimtab doctor") and name != "trimtab trace import":
                used.add(option)
                assert (action.help or "").startswith(SHARED[option][1]), (name, option)
                assert action.nargs == 0 or action.metavar in ("N", "X", "NAME", "FILE", "KEY=VALUE")
    assert used == SHARED.keys()
    outputs = [options_of(parser).get("--output") for parser in PARSERS.values()]
    assert {action.option_strings[0] for action in outputs if action} == {"-o"}


def test_defaults_of_help_are_those_of_the_settings() -> None:
    runtime = options_of(PARSERS["python -m benchmarks.runtime"])
    for name in ("tokens", "rounds", "seeds"):
        assert runtime[f"--{name}"].default == getattr(RuntimeBenchmark, name)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    made = synthesize(num_sequences=32, sequence_length=64, num_layers=2, num_experts=128, top_k=8, zipf=0.9)
    write_trace(made, tmp_path / "trace.parquet")
    return str(tmp_path / "trace.parquet")


@pytest.mark.parametrize(
    "words",
    [
        "trace info {trace}",
        "analyze {trace} --html {folder}/page.html",
        "plan {trace} --ranks 4",
        "simulate {trace} --ranks 4 --policy trimtab --micro-steps 1",
    ],
)
def test_json_to_stdout_is_pure_json(words: str, trace: str, tmp_path: Path) -> None:
    words = words.format(trace=trace, folder=tmp_path)
    command = [sys.executable, "-m", "trimtab.cli.main", *words.split(), "--json", "-"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(result.stdout)["schema"].startswith("trimtab-")
    assert not (tmp_path / "-").exists()


def test_json_to_stdout_of_an_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("experiments.papers.__main__", ["--read", str(FIGURES), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(FIGURES.read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulat"], "trimtab: unknown command simulat; did you mean simulate? (see trimtab --help)"),
        (["trace", "inf"], "trimtab trace: unknown action inf; did you mean info? (see trimtab trace --help)"),
        (["plan", "t", "--ranks", "4", "--token", "512"], "did you mean --token-budget?"),
        (["plan", "t", "--rank", "8"], "unknown option --rank; did you mean --ranks? (see trimtab plan --help)"),
        (["plan", "--step=3", "-rank=8"], "unknown option -rank; did you mean --ranks? (see trimtab plan --help)"),
        (["plan", "t", "--ranks", "8", "--policy", "trimtb"], "unknown --policy trimtb; did you mean trimtab?"),
        (["simulate", "t", "--cluster", "h100x9"], "unknown cluster h100x9; did you mean h100x8?"),
        (["analyze", "t", "--model", "kimi-k3"], "unknown model kimi-k3; did you mean kimi-k2?"),
        (["simulate", "t", "--gpu-hour", "2"], "--gpu-hour; it is an option of trimtab advise, trimtab rollout (see"),
        (["--jsn", "plan"], "trimtab: unknown option --jsn (see trimtab --help)"),
    ],
)
def test_mistyped_names_get_the_closest_match(words: list[str], message: str, error_of: Command) -> None:
    assert message in error_of(*words)


def test_earlier_spellings_are_accepted(tmp_path: Path, trace: str) -> None:
    for old, new in ALIASES.items():
        users = [parser for parser in PARSERS.values() if new in options_of(parser)]
        assert users
        assert not any(re.search(rf"{old}\b", parser.format_help()) for parser in users)
    sizes = ["--ranks", "4", "--micro-steps", "1"]
    for words in ("--policies llep", "--policy llep", "--policies=llep --policy llep"):
        assert main(["-q", "simulate", trace, *sizes, *words.split(), "--json", str(tmp_path / "s.json")]) == 0
        figures = json.loads((tmp_path / "s.json").read_text())
        assert list(figures["policies"]) == ["static", "llep", "balanced"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "-"], "-: not a file; only --json - writes to standard output"),
        (["--json", "/dev/stdou"], "/dev/stdou: no such device"),
        (["--json", "{trace}"], "{trace}: to be read and written"),
        (["--json", "{trace}.x", "-o", "{trace}.x"], "{trace}.x: to be written twice"),
        (["--json", "{trace}/x"], "is not a folder that can be written to"),
    ],
)
def test_bad_outputs_are_found_before_planning(
    words: list[str], message: str, trace: str, tmp_path: Path, error_of: Command
) -> None:
    words = [word.format(trace=trace) for word in words]
    assert message.format(trace=trace) in error_of("plan", trace, "--ranks", "4", *words)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.parquet"]


def test_a_device_may_be_an_output(trace: str) -> None:
    assert main(["-q", "plan", trace, "--ranks", "4", "--json", "/dev/null"]) == 0


@pytest.mark.parametrize(
    ("flags", "level", "notes"),
    [
        ([], logging.INFO, ["model: ", "page: "]),
        (["-q"], logging.WARNING, []),
        (["-v"], logging.DEBUG, ["model: ", "page: ", "trimtab 0."]),
    ],
)
def test_message_levels(
    flags: list[str], level: int, notes: list[str], trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["analyze", trace, "--html", str(tmp_path / "page.html")]
    for command in ([*flags, *words], [*words, *flags]):
        assert main(command) == 0
        out, error = capsys.readouterr()
        assert logging.getLogger("trimtab").level == level
        assert "Does known routing help?" in out
        lines = error.splitlines()
        assert len(lines) == len(notes)
        assert all(line.startswith(note) for line, note in zip(lines, notes, strict=True))


@pytest.mark.parametrize("words", [("analyze",), ("simulate", "--ranks", "4", "--policy", "static")])
def test_no_progress_bar_is_left_on_a_terminal(
    words: tuple[str, ...], trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([words[0], trace, *words[1:]]) == 0
    before, _, after_the_last_erased_line = capsys.readouterr().err.rpartition("\x1b[2K")
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in before
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" not in after_the_last_erased_line


def test_the_library_configures_no_logging() -> None:
    code = "import logging, trimtab.api.plan; print(logging.getLogger('trimtab').handlers, logging.root.handlers)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[] []\n"
