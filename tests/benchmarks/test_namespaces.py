"""Nodes on one machine: placement of ranks, limits of links, removal of all resources."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from benchmarks import namespaces
from benchmarks.harness import run_command
from benchmarks.namespaces import run_on_nodes
from trimtab.errors import InputError, RankFailedError

ROOT = Path(__file__).parents[2]
JOB = [sys.executable, str(Path(__file__).parents[1] / "helpers" / "node_rank.py")]
ON_NODES = """import sys
from benchmarks.namespaces import run_on_nodes
run_on_nodes(sys.argv[1:], nodes=2, ranks_per_node=2, link_mbit=500)"""
# Requirements of namespaces, tested without the code under test.
PROBE = """
set -e
mount -t tmpfs tmpfs /dev/shm
ip link add name port0 type veth peer name port1
ip link add name port2 type bridge
tc qdisc add dev port0 root tbf rate 1mbit burst 9kb latency 9ms
"""


def why_no_nodes() -> str:
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if missing := [tool for tool in ("unshare", "nsenter", "taskset", "ip", "tc") if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", PROBE], capture_output=True, text=True, check=False
    )
    return f"this kernel or container refuses: {probe.stderr.strip()}" if probe.returncode else ""


NO_NODES = why_no_nodes()
needs_nodes = pytest.mark.skipif(bool(NO_NODES), reason=NO_NODES)


def run_job(*command: str, link_mbit: float = 1000) -> None:
    run_on_nodes(command, nodes=2, ranks_per_node=2, link_mbit=link_mbit)


def namespaces_in_use() -> set[str]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns" / "net"))
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.nightly
@needs_nodes
def test_only_links_between_nodes_are_limited(tmp_path: Path) -> None:
    run_job(*JOB, "report", str(tmp_path / "seen.json"), link_mbit=100)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["sum"] == 15
    places = [[int(of[name]) for name in ("RANK", "GROUP_RANK", "LOCAL_RANK")] for of in seen["ranks"]]
    assert places == [[0, 0, 0], [1, 0, 1], [2, 1, 0], [3, 1, 1]]
    assert all(of["WORLD_SIZE"] == "4" and of["LOCAL_WORLD_SIZE"] == "2" for of in seen["ranks"])
    assert [of["sees_mark"] for of in seen["ranks"]] == [True, True, False, False]
    assert {of["folder"] for of in seen["ranks"]} == {os.getcwd()}
    assert not Path("/dev/shm/trimtab-test-mark").exists()
    first, second, third, fourth = (of["namespace"] for of in seen["ranks"])
    assert first == second != third == fourth
    assert {first, third}.isdisjoint(namespaces_in_use())
    first, second, third, fourth = (of["cores"] for of in seen["ranks"])
    assert (first, third) == (second, fourth)
    assert set(first).isdisjoint(third) or len(os.sched_getaffinity(0)) == 1
    # A loaded machine is slower, never faster than the link.
    for across in (seen["mbit"]["0-2"], seen["mbit"]["3-1"], seen["all_to_all_mbit"]):
        assert 30 < across < 110
    for inside in (seen["mbit"]["0-1"], seen["mbit"]["2-3"]):
        assert inside > 300


@needs_nodes
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("test $RANK = 2 && kill -KILL $$; sleep 600", r"rank 2 \(process \d+\) was killed by SIGKILL"),
        ("test $RANK = 2 && kill -STOP $$; sleep 600", r"rank 2 \(process \d+\) has been suspended for 2 s"),
        ("test $RANK = 1 && exit 7; sleep 600", r"rank 1 \(process \d+\) ended with exit status 7"),
        ("test $RANK = 3 && exit 7; sleep 20; exit 1", r"rank 3 \(process \d+\) ended with exit status 7"),
    ],
)
def test_rank_that_ends_without_a_report_ends_the_job(
    script: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "TIMEOUT", timedelta(seconds=2))
    start = time.monotonic()
    with pytest.raises(RankFailedError, match=message):
        run_job("sh", "-c", script)
    assert time.monotonic() - start < 300


@needs_nodes
def test_a_rank_that_raises_ends_the_job() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 3 failed: ArithmeticError: broken on purpose; the run was stopped"):
        run_job(*JOB, "one_raises", "ArithmeticError")
    with pytest.raises(InputError, match=r"^broken on purpose$"):
        run_job(*JOB, "one_raises", "InputError")
    assert time.monotonic() - start < 120


@needs_nodes
@pytest.mark.long
def test_the_runtime_bench_compares_with_node_blind_planning(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    sizes = ["--ranks", "4", "--tokens", "128", "--rounds", "1", "--seeds", "1"]
    assert run_command("benchmarks.runtime", ["--nodes", "2", "--link-mbit", "1000", *sizes, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["ranks"] == 4
    assert (figures["settings"]["ranks_per_node"], figures["settings"]["link_mbit"]) == (2, 1000)
    assert set(figures["policies"]) == {"static", "trimtab", "node-blind", "balanced", "native"}
    assert figures["speedup_vs_node_blind"] > 0


@needs_nodes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_all_processes_end_with_the_launcher(number: signal.Signals, tmp_path: Path) -> None:
    before = namespaces_in_use()
    script = f"readlink /proc/self/ns/net > {tmp_path}/$RANK.part; mv {tmp_path}/$RANK.part {tmp_path}/$RANK; sleep 600"
    command = [sys.executable, "-c", ON_NODES, "sh", "-c", script]
    # Background processes ignore SIGINT, and so do their children.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=heed, cwd=ROOT) as launcher:
        try:
            wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(4)), 60, "the ranks didn't start")
            made = {(tmp_path / str(rank)).read_text().strip() for rank in range(4)}
            assert len(made) == 2
            assert made <= namespaces_in_use() - before
            launcher.send_signal(number)
            launcher.wait(60)
        finally:
            launcher.kill()
    assert launcher.returncode == -number
    wait_for(lambda: made.isdisjoint(namespaces_in_use()), 60, "a process still runs")


def test_error_messages_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run_command("benchmarks.runtime", ["--nodes", "2", "--link-mbit", "500"]) == 2
    error = capsys.readouterr().err
    assert error.endswith("which only root can create; run this as root\n")
    assert error.count("\n") == 1
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with monkeypatch.context() as patch:
        patch.setattr(namespaces, "TOOLS", {})
        with pytest.raises(InputError, match="no-such-program: no such program"):
            run_job("no-such-program")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match=r"install iproute2 and util-linux$"):
        run_job("true")
