"""Commands where something usual is missing: a home, a terminal, standard output, a folder that can be written to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trimtab
from trimtab.cli.main import main

# These start commands, or import files in another process.
pytestmark = pytest.mark.slow

MAIN = [sys.executable, "-m", "trimtab.cli.main"]


def test_no_home_a_narrow_terminal_and_a_removed_working_directory(trace_file: Path, tmp_path: Path) -> None:
    """Also without assertions, and with a variable of a job's allocation that is no number."""
    environment = os.environ | {"COLUMNS": "20", "WORLD_SIZE": "abc"}
    del environment["HOME"]
    (tmp_path / "gone").mkdir()
    command = f'cd "{tmp_path}/gone" && rmdir "{tmp_path}/gone" && exec "$@"'
    arguments = [sys.executable, "-O", *MAIN[1:], "analyze", "-q", str(trace_file)]
    source = str(Path(trimtab.__file__).parents[1])
    # numba needs a working directory to compile.
    assert main(["analyze", "-q", str(trace_file)]) == 0
    ended = subprocess.run(
        ["bash", "-c", command, "bash", *arguments], env=environment | {"PYTHONPATH": source}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "On 16 ranks the busiest computes" in " ".join(ended.stdout.split())
    assert max(map(len, ended.stdout.split("\n\n")[0].splitlines())) <= 20


def test_a_file_in_a_removed_working_directory(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["plan", str(trace_file), "--ranks", "2", "-o", "plan.npz"]) == 2
    assert capsys.readouterr().err == "trimtab plan: working directory: No such file or directory\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_standard_output_is_one_line(trace_file: Path) -> None:
    for more in ([], ["--json", "-"]):
        command = [*MAIN, "trace", "info", "-q", str(trace_file), *more]
        with Path("/dev/full").open("w") as full:
            ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert ended.returncode == 2
        assert ended.stderr == "trimtab trace: standard output: No space left on device\n"


@pytest.mark.parametrize(("name", "status"), [("trace.parquet", 0), ("absent.parquet", 2)])
def test_closed_streams_do_not_change_the_status(trace_file: Path, name: str, status: int) -> None:
    arguments = [*MAIN, "trace", "info", name, "--json", "info.json"]
    closed = subprocess.run(
        ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *arguments], cwd=trace_file.parent, check=False
    )
    assert closed.returncode == status
    assert (trace_file.parent / "info.json").exists() == (status == 0)


def test_an_installation_that_cannot_be_written_to(trace_file: Path, tmp_path: Path) -> None:
    """No folder for compiled kernels: neither the package's nor the user's."""
    package, home = tmp_path / "site" / "trimtab", tmp_path / "home"
    shutil.copytree(Path(trimtab.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "compiled"))
    home.mkdir()
    folders = [home, *(folder for folder in (package, *package.rglob("*")) if folder.is_dir())]
    # Root may write everywhere, unless it gives that up.
    as_user = ["setpriv", "--bounding-set=-all"] if os.geteuid() == 0 else []
    if as_user and not shutil.which("setpriv"):
        pytest.skip("root without setpriv")
    environment = os.environ | {"PYTHONPATH": str(package.parent), "HOME": str(home), "NUMBA_DISABLE_JIT": "0"}
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    for folder in folders:
        folder.chmod(0o555)
    try:
        ended = subprocess.run(
            [*as_user, *MAIN, "trace", "info", str(trace_file)], env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert ended.returncode == 0, ended.stderr
    assert "2 MoE layers, 32 experts, top-4" in ended.stdout
    assert ended.stderr == "compiling kernels, at every start unless NUMBA_CACHE_DIR can be written to (up to 40 s)\n"
