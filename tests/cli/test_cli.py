"""Commands: output, exit status, and one line for every mistake."""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab import StepPlan, Workload, read_trace
from trimtab.cli import output as cli_output
from trimtab.cli.main import main, run
from trimtab.errors import InputError, RankFailedError

# These start commands, or import files in another process.
pytestmark = pytest.mark.slow

Printed = Callable[..., str]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    config = {
        "model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 2,
        "hidden_size": 2048, "moe_intermediate_size": 1024,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path / "config.json"


def test_trace_info(trace_file: Path, tmp_path: Path, printed: Printed) -> None:
    output = printed("trace", "info", trace_file, "--json", str(tmp_path / "info.json"))
    assert "2 MoE layers, 32 experts, top-4" in output
    assert "2,048 tokens in all" in output
    figures = json.loads((tmp_path / "info.json").read_text())
    assert (figures["tokens"], figures["unknown_routes"]) == (2048, 0)
    assert all(ratio > 1.5 for ratio in figures["hottest_over_mean"])


def test_trace_synth_writes_a_readable_trace(tmp_path: Path, printed: Printed) -> None:
    path = tmp_path / "new" / "math.parquet"
    sizes = ["--sequences", "40", "--mean-length", "100", "--layers", "2", "--experts", "64", "--steps", "2"]
    output = printed("trace", "synth", "qwen3-30b-math", "-o", path, *sizes)
    assert "synthetic qwen3-30b-math: 2 MoE layers, 64 experts, top-8" in output
    assert "80 of " in output
    trace = read_trace(path)
    assert trace.steps.tolist() == [0] * 40 + [1] * 40
    assert trace.sequence_lengths.max() <= 200
    assert [file.name for file in path.parent.iterdir()] == ["math.parquet"]
    printed("plan", path, "--ranks", "4", "--token-budget", "512", "--step", "1")


def test_plan_writes_the_plan(trace_file: Path, config_file: Path, tmp_path: Path, printed: Printed) -> None:
    out = ["--json", str(tmp_path / "plan.json"), "-o", str(tmp_path / "plan.npz"), "--model", str(config_file)]
    assert "static" in printed("plan", trace_file, "--ranks", "4", "--token-budget", "512", *out)
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["max_over_mean_after"]["mean"] < 1.05 < figures["max_over_mean_before"]["mean"]
    assert figures["weight_bytes_per_micro_step"] == figures["replicas"] * 3 * 2048 * 1024 * 2 / figures["micro_steps"]
    assert StepPlan.load(tmp_path / "plan.npz").hash == figures["plan_hash"]


def test_plan_keeps_to_row_limits(trace_file: Path, tmp_path: Path) -> None:
    size = ["--ranks", "4", "--token-budget", "512", "--json", str(tmp_path / "plan.json")]
    for limits in (["--exact", "--slots", "8"], ["--max-rows-per-rank", "2060"]):
        assert main(["plan", str(trace_file), *size, "-o", str(tmp_path / "plan.npz"), *limits]) == 0
        plan, trace = StepPlan.load(tmp_path / "plan.npz"), read_trace(trace_file)
        loads_MLR = plan.rank_loads(Workload.from_trace(trace, plan.schedule))
        even_ML = -(-loads_MLR.sum(axis=2) // 4)
        assert (loads_MLR.max(axis=2) <= (even_ML if "--exact" in limits else 2060)).all()


def test_windows_is_refused_by_name(error_of: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert error_of("plan", "a.parquet", "--ranks", "4") == (
        "trimtab plan: Trimtab runs on Linux and macOS; on Windows, use it in WSL\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace", "info", "absent.parquet"], "absent.parquet: no such file"),
        (["trace", "synth", "magic", "-o", "{folder}/new"], "unknown preset magic; use one of qwen3-30b-math,"),
        (["trace", "synth", "spike"], "the following arguments are required: -o"),
        (["trace", "synth", "spike", "-o", "{folder}/a.jsonl"], "a.jsonl: would hold Parquet; name it a.parquet"),
        (["trace", "synth", "spike", "-o", "{folder}"], ": a folder; name the file to write"),
        (["trace", "synth", "spike", "-o", "{trace}/new"], "trace.parquet is not a folder that can be written to"),
        (["trace", "synth", "spike", "-o", "{folder}/new", "--top-k", "129"], "1 to the number of experts, 128"),
        (["trace", "synth", "spike", "-o", "{folder}/new", "--max-length", "9"], "1 to the greatest length, 9"),
        (["trace", "synth", "spike", "-o", "{folder}/new", "--sequences", "500000000", "--steps", "2"], "32.8 TB of"),
        (["plan", "{trace}", "--ranks", "two"], "'two' should be a whole number of at least 1"),
        (["plan", "{trace}", "--ranks", "2", "--step", "99999999999"], "99999999999 is too large; it should be at"),
        (["plan", "{trace}", "--ranks", "2", "--step", "2147483648"], "should be at most 2147483647"),
        (["plan", "{trace}", "--ranks", "2", "--step", "2147483647"], "no step 2147483647; it has"),
        (["plan", "{trace}", "--ranks", "2", "--slots", "4097"], "slots per rank is 4097; it should be from 0 to 4096"),
        (["plan", "{trace}", "--ranks", "2", "-o", "{folder}/" + "a" * 300], "File name too long"),
        (["plan", "{trace}", "--ranks", "2", "--model", "{config}", "--set", "hidden_size=wide"], "hidden_size"),
        (["plan", "{trace}", "--ranks", "2", "--max-rows-per-rank", "9"], " can be kept with 16 slots per rank"),
        (["plan", "{trace}", "--ranks", "2", "--max-rows-per-rank", "0"], "'0' should be a whole number of at least 1"),
        (["plan", "{trace}", "--ranks", "2", "--policy", "llep", "--exact"], "are for policy trimtab"),
        (["plan", "{trace}", "--ranks", "2", "--model", "{trace}"], "can't be read as text"),
        (["trace", "synth", "spike", "-o", "{folder}/new", "--mean-length", "99999999999"], "99999999999 is too large"),
        (
            ["analyze", "{folder}/dumps"],
            "dumps: holds no *.parquet; what a framework recorded is converted by: trimtab",
        ),
        (["analyze", "a" * 300, "--ranks", "8"], "File name too long"),
        (["analyze", "{trace}", "--ranks", "5", "--json", "{folder}/new"], "--ranks 5 doesn't divide the 32 experts"),
        (["analyze", "{trace}", "--html", "{folder}", "--json", "{folder}/new"], "a folder; name the file to write"),
        (["simulate", "{trace}", "--ranks", "5", "--json", "{folder}/new"], "--ranks 5 doesn't divide the 32 experts"),
        (["simulate", "{trace}", "--token-budget", "99", "--micro-steps", "2"], "not allowed with argument"),
        (
            ["simulate", "{trace}", "--policy", "static,magic"],
            "unknown --policy magic; use one of static, scheduled, eplb,",
        ),
        (["simulate", "{trace}", "--sharding", "zero"], "unknown --sharding zero; did you mean zero1?"),
        (["simulate", "{trace}", "--slots", "-1"], "should be a whole number of at least 0"),
        (["simulate", "{trace}", "--perfetto", "{folder}/t.txt"], "should end in .json or .json.gz"),
        (["simulate", "{trace}", "--set", "top_k"], "should be KEY=VALUE"),
        (["simulate", "{trace}", "--set", "vocab_size=9"], "--set vocab_size: needs --model"),
        (["simulate", "{trace}", "--model", "{config}", "--set", "num_hidden_layer=3"], "mean num_hidden_layers?"),
        (["simulate", "{trace}", "--model", "Qwen/Qwen3-31B-A3B"], "did you mean Qwen/Qwen3-30B-A3B?"),
        (["trace", "export", "{folder}", "--to", "megatron", "-o", "{trace}"], "trace.parquet: to be read and written"),
        (["doctor", "--ranks", "1"], "--ranks is 1; "),
        (["doctor", "--model", "absent"], "absent: no such file"),
        (["doctor", "--megatron", "absent"], "can't be read"),
        (["doctor", "--gpu", "--model", "qwen"], "--model: --gpu does not check it"),
        (["doctor", "--gpu"], "--gpu needs a GPU, and torch finds none"),
        (["calibrate", "-o", "{folder}/new", "--json", "{folder}"], "a folder; name the file to write"),
        (["calibrate", "-o", "{folder}/new", "--model", "kimi-k2"], "'kimi_k2' can't be run; use one of qwen3_moe"),
        (["calibrate", "-o", "{folder}/new", "--model", "absent"], "absent: neither a model"),
        (["calibrate", "-o", "{folder}/new", "--rounds", "0"], "'0' should be a whole number of at least 1"),
        (["calibrate"], "the following arguments are required: -o/--out"),
        (["waltz"], "unknown command waltz; use one of trace,"),
    ],
)
def test_input_errors_are_one_line_with_status_2(
    arguments: list[str], message: str, trace_file: Path, config_file: Path, tmp_path: Path, error_of: Printed
) -> None:
    (tmp_path / "dumps").mkdir()
    places = {"trace": trace_file, "config": config_file, "folder": tmp_path}
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert message in error_of("-q", *(argument.format(**places) for argument in arguments))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_commands_without_ranks_never_import_torch_or_pandas(
    trace_file: Path, config_file: Path, tmp_path: Path
) -> None:
    """With torch and transformers blocked, everything but training works. Arrow would import pandas on its own."""
    simulate = ["simulate", str(trace_file), "--model", str(config_file), "--ranks", "4", "--policy", "trimtab"]
    simulate += ["--html", str(tmp_path / "page.html"), "--perfetto", str(tmp_path / "timeline.json")]
    exported = tmp_path / "trace.jsonl"
    program = f"""
import sys
asked = set()
class Blocked:
    def find_spec(self, name, path=None, target=None):
        asked.add(name)
        if name.split('.')[0] in ('torch', 'transformers', 'tokenizers'):
            raise ImportError('blocked ' + name)
sys.meta_path.insert(0, Blocked())
import trimtab, trimtab.planner, trimtab.policies, trimtab.simulator, trimtab.report.tables
from trimtab.cli.main import main
assert main(['trace', 'info', {str(trace_file)!r}]) == 0
assert main(['plan', {str(trace_file)!r}, '--ranks', '4', '--token-budget', '512']) == 0
assert main({simulate!r}) == 0
assert main(['trace', 'export', {str(trace_file)!r}, '--to', 'megatron', '-o', {str(exported)!r}]) == 0
again = {str(tmp_path / "again.parquet")!r}
assert main(['trace', 'import', {str(exported)!r}, '--num-experts', '32', '-o', again]) == 0
assert main(['analyze', again, '--ranks', '4']) == 0
assert 'pandas' not in asked
from benchmarks.harness import run_command
planner = ['--sizes', '2/16', '--layers', '1', '--slots', '1', '--policies', 'trimtab']
assert run_command('benchmarks.planner', planner) == 0
assert 'torch' not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_help_imports_no_large_package() -> None:
    program = """
import sys, trimtab
from trimtab.cli.main import main
try:
    dir(trimtab)
    main(['--help'])
except SystemExit as stop:
    assert not stop.code
print(sorted({'numpy', 'numba', 'pyarrow', 'rich'} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("[]\n")
    assert "analyze" in result.stdout


def test_without_arguments_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    out, error = capsys.readouterr()
    assert (stop.value.code, error) == (0, "")
    assert "analyze" in out


def test_a_locale_without_unicode_is_enough(trace_file: Path) -> None:
    """Tables have characters that ASCII lacks."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "trimtab.cli.main", "analyze", str(trace_file), "--ranks", "8"]
    ended = subprocess.run(command, env=os.environ | ascii_only, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.isascii()
    assert b"On 8 ranks the busiest computes" in b" ".join(ended.stdout.split())


def test_closed_pipe_is_not_an_error(trace_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trimtab.cli.main", "analyze", "-q", str(trace_file)]
    command += ["--json", str(tmp_path / "a.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1
    assert json.loads((tmp_path / "a.json").read_text())["schema"] == "trimtab-analyze-2"


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (InputError("--ranks is 0"), 2, "--ranks is 0"),
        (PermissionError(13, "Permission denied", "out.json"), 2, "out.json: Permission denied"),
        (RankFailedError("rank 1 was killed"), 1, "rank 1 was killed"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "not enough memory"),
        (MemoryError("Unable to allocate 9 TiB"), 1, "not enough memory: Unable to allocate 9 TiB"),
    ],
)
def test_errors_have_a_status_and_one_line(
    error: BaseException, status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> None:
        raise error

    assert run("trimtab plan", lambda: argparse.Namespace(run=fail)) == status
    assert capsys.readouterr().err == f"trimtab plan: {text}\n"


def test_full_disk_is_one_line_and_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        status = main(["trace", "synth", "qwen3-30b-mixed", "--sequences", "8", "-o", str(tmp_path / "trace.parquet")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status == 2
    assert capsys.readouterr().err == f"trimtab trace: {tmp_path / 'trace.parquet'}: File too large\n"
    assert not list(tmp_path.iterdir())


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "trimtab", "plan", "absent.parquet", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("absent.parquet: no such file\n")


@pytest.mark.parametrize("module", ["trimtab.cli.main", "numpy"])
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_stack(module: str, trace_file: Path) -> None:
    """Also in an import that ignores it."""
    program = f"""
import contextlib, os, runpy, signal, sys
# A shell's jobs in the background ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ['trimtab', 'analyze', {str(trace_file)!r}]
runpy.run_module('trimtab', run_name='__main__')
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_long_work_says_what_it_does_where_no_bar_is_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cli_output, "SAID_EVERY_S", 0.001)
    threads = threading.active_count()
    with caplog.at_level(logging.INFO, "trimtab"), cli_output.progress_shown() as update:
        update("eplb", 1, 3)
        wait_until(lambda: "eplb, 1 of 3 done" in caplog.messages)
        update("vllm: 5 tokens")
        wait_until(lambda: "vllm: 5 tokens" in caplog.messages)
    wait_until(lambda: threading.active_count() == threads)


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(30_000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("it does not come")


def test_what_a_second_process_compiles_runs() -> None:
    exec(cli_output.PLANNING.format(names=["trimtab"]), {})
