"""`run_on_nodes`: emulated nodes on one machine, as network namespaces that are connected by links of limited rate.

The gain on several nodes depends on the links between them, which `python -m benchmarks.runtime --nodes 2 --link-mbit
500` limits on one Linux machine. It needs root, iproute2 and util-linux, and runs on gloo:

       node 0              switch              node 1
    rank 0, rank 1 --eth0========node0, node1========eth0-- rank 2, rank 3
             veth pairs, limited at both ends (token bucket)

Each node has one interface and one address. Ranks of a node communicate over loopback, since the kernel does not send
packets to a local address over the interface. Other nodes are behind a switch, itself a namespace, through a link
whose rate is limited both ways; after a pause, 4 ms of traffic pass at full rate. Nodes share the machine's cores
evenly. Each has its own shared memory (`/dev/shm`). On a busy 2-core machine a limit of 500 Mbit/s gave 430 to 480
between nodes, one of 2,000 gave 410 to 1,940; inside a node it was 9,000 and more.

Namespaces are not registered with `ip netns`, so the kernel removes each with its last process. A keeper process in
each namespace kills all others in it when the process that created the namespace has ended for any reason.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trimtab.errors import InputError
from trimtab.launch.launcher import ALLOCATOR, GRACE_S, TIMEOUT, Failure, Suspensions, raise_cause

TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "taskset": "util-linux", "unshare": "util-linux"}
INTERFACE = "eth0"
# The addresses have no host names; torch would warn of that for every connection.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
PORT = 29500
POLL_S = 0.05
# Burst size of the rate limit, in seconds at full rate; compensates late kernel timers.
BURST_S = 0.004
LEAST_BURST = 1 << 16
# Prints a line when it is in the namespace, and waits for the end of its input. Then it kills all other processes in
# the namespace.
KEEPER = """
[ /proc/self -ef /proc/$$ ] || { echo '/proc belongs to another PID namespace; remount /proc' >&2; exit 1; }
mount -t tmpfs tmpfs /dev/shm || exit 1
echo inside
cat
alone=
until [ "$alone" ]; do
    alone=yes
    for process in /proc/[0-9]*; do
        if [ $process/ns/net -ef /proc/self/ns/net ] && [ $process != /proc/$$ ]; then
            kill -KILL ${process#/proc/} 2>/dev/null && alone=
        fi
    done
    [ "$alone" ] || sleep 0.1
done
"""


def run_on_nodes(command: Sequence[str], *, nodes: int, ranks_per_node: int, link_mbit: float) -> None:
    """Run a command once for every rank, with the environment variables of torchrun. Needs Linux and root.

    Ranks inherit stdout and stderr. If one fails, the others are stopped. When this process ends, for any reason, all
    ranks and their child processes are killed. Ranks have no other network access.

    Args:
        command: program and arguments.
        nodes: number of emulated nodes.
        ranks_per_node: processes in each.
        link_mbit: rate of the link between a node and all others, each way, in 10^6 bits a second.

    Raises:
        InputError: if namespaces can't be created, there is no such program, or a rank failed with an InputError.
        RankFailedError: naming the rank that failed first and why.
    """
    _check_tools()
    if shutil.which(command[0]) is None:
        raise InputError(f"{command[0]}: no such program; name a command to run on the nodes")
    cores = sorted(os.sched_getaffinity(0))
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with ExitStack() as stack:
            keepers = stack.enter_context(_linked_nodes(nodes, link_mbit))
            # Unlinked files, which are removed when this process ends.
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(nodes * ranks_per_node)]
            error_files = [Path(f"/proc/{os.getpid()}/fd/{file.fileno()}") for file in files]
            for rank, error_file in enumerate(error_files):
                node, local_rank = divmod(rank, ranks_per_node)
                environment = {
                    **ALLOCATOR,
                    **QUIET,
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(nodes * ranks_per_node),
                    "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(ranks_per_node),
                    "GROUP_RANK": str(node),
                    "MASTER_ADDR": _address(0),
                    "MASTER_PORT": str(PORT),
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                    "TORCHELASTIC_ERROR_FILE": str(error_file),
                }
                # Nodes use disjoint cores if there is a core for each.
                share = cores[node::nodes] or cores
                argv = ["taskset", "--cpu-list", ",".join(map(str, share)), *_enter(keepers[node])]
                # nsenter changes the folder.
                argv += ["env", f"--chdir={os.getcwd()}", *command]
                # Own process group: Ctrl-C in the terminal does not reach the ranks.
                ranks.append(subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, process_group=0))
            _watch(ranks, error_files)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _check_tools() -> None:
    if os.geteuid() != 0:
        raise InputError("nodes on one machine are network namespaces, which only root can create; run this as root")
    missing = {package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if missing:
        raise InputError(f"nodes on one machine need {', '.join(TOOLS)}; install {' and '.join(sorted(missing))}")


@contextmanager
def _linked_nodes(count: int, link_mbit: float) -> Iterator[list[int]]:
    """Namespaces connected to a switch. Yields the process id of the keeper of each."""
    burst = max(LEAST_BURST, round(link_mbit * 1e6 / 8 * BURST_S))
    limit = f"root tbf rate {round(link_mbit * 1e6)}bit burst {burst} latency 100ms"
    with ExitStack() as stack:
        switch, *nodes = [stack.enter_context(_namespace()) for _ in range(count + 1)]
        _configure(switch, "ip link add switch type bridge", "ip link set switch up")
        for node, keeper in enumerate(nodes):
            _configure(
                switch,
                f"ip link add node{node} type veth peer name {INTERFACE} netns {keeper}",
                f"ip link set node{node} master switch up",
                f"tc qdisc add dev node{node} {limit}",
            )
            _configure(
                keeper,
                "ip link set lo up",
                f"ip address add {_address(node)}/16 dev {INTERFACE}",
                f"ip link set {INTERFACE} up",
                f"tc qdisc add dev {INTERFACE} {limit}",
            )
        yield nodes


def _address(node: int) -> str:
    return f"10.77.{node // 250}.{node % 250 + 1}"


@contextmanager
def _namespace() -> Iterator[int]:
    """A network and a mount namespace for the duration of the context. Yields the process id of its keeper."""
    argv, pipe = ["unshare", "--net", "--mount", "sh", "-c", KEEPER], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0) as keeper:
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        if not keeper.stdout.readline():
            raise InputError(f"network namespaces can't be created: {' '.join(keeper.stderr.read().decode().split())}")
        yield keeper.pid


def _enter(keeper: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{keeper}/ns/net", f"--mount=/proc/{keeper}/ns/mnt"]


def _configure(keeper: int, *commands: str) -> None:
    for command in commands:
        done = subprocess.run([*_enter(keeper), *command.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise InputError(f"nodes can't be linked: `{command}` printed {' '.join(done.stderr.split())}")


def _watch(ranks: list[subprocess.Popen[bytes]], error_files: list[Path]) -> None:
    """Return when all ranks have ended; raise if one has failed or is suspended for too long."""
    exits: dict[int, tuple[int, int | None]] = {}
    suspensions = Suspensions(TIMEOUT)
    deadline = float("inf")
    while len(exits) < len(ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        for rank, process in enumerate(ranks):
            if rank not in exits and (status := process.poll()) is not None:
                exits[rank] = process.pid, status
                if status:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        running = {rank: process.pid for rank, process in enumerate(ranks) if rank not in exits}
        suspensions.add(running, POLL_S)
    if deadline < float("inf"):
        failures = {rank: failure for rank, file in enumerate(error_files) if (failure := read_error_file(file))}
        raise_cause(exits | {rank: (pid, None) for rank, pid in running.items()}, failures)


def read_error_file(file: Path) -> Failure | None:
    """The report in a rank's `TORCHELASTIC_ERROR_FILE`, if any; the rank has printed its traceback."""
    try:
        message = json.loads(file.read_text())["message"]
    except (FileNotFoundError, ValueError):
        return None
    kind, _, text = message["message"].partition(": ")
    is_input = kind == InputError.__name__
    line = text if is_input else message["extraInfo"]["py_callstack"].strip().splitlines()[-1]
    return Failure(line, "", is_input, file.stat().st_mtime)
