"""`python -m benchmarks.traces`: time and memory of importing and analyzing a large dump, and the size of its file.

Write a dump as vLLM's server would (48 layers, top-8 of 128 experts), import it and analyze it.
"""

from __future__ import annotations

import base64
import io
import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.harness import Figures, main
from benchmarks.routing import EXPERTS, long_responses, sizes_of
from benchmarks.tables import Columns, figure_table, named_rows, quantity
from trimtab.array_type import Array
from trimtab.calibration.alternating_rounds import alternate
from trimtab.cli.options import add_options, positive
from trimtab.cli.parser import Parser
from trimtab.report.number_text import bytes_text, seconds
from trimtab.trace import RoutingTrace

STEPS = 4


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--tokens", type=positive, default=1_000_000, help="tokens of the dump")
    add_options(parser, "--rounds", default=5)


def run_benchmark(tokens: int, rounds: int, seed: int = 0) -> Figures:
    """Write a dump in the format of vLLM's server; import and analyze it, each in its own process.

    Args:
        tokens: approximate number of tokens of the dump.
        rounds: counted runs of each command. They follow one that is not counted, because kernels may have to be
            compiled.
        seed: of routing and token ids.
    """
    trace = long_responses(tokens, steps=STEPS, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        dump, imported = Path(folder) / "rollout.jsonl", Path(folder) / "rollout.parquet"
        _write_dump(trace, dump, seed)
        commands = {
            "import": ["trace", "import", str(dump), "-o", str(imported), "--num-experts", str(EXPERTS)],
            "analyze": ["analyze", str(imported), "--ranks", "16", "--html", str(Path(folder) / "analysis.html")],
        }
        variants = {name: partial(_run, command) for name, command in commands.items()}
        runs = alternate(variants, rounds + 1, warm_up=0, progress="bench traces")
        return {
            "schema": "trimtab-bench-traces-1",
            **sizes_of(trace),
            "raw_bytes": trace.expert_ids.nbytes,
            "dump_bytes": dump.stat().st_size,
            "file_bytes": imported.stat().st_size,
            "file_over_raw": imported.stat().st_size / trace.expert_ids.nbytes,
            "commands": {
                name: {
                    "first_s": times[0][0],
                    "s": [seconds for seconds, _ in times[1:]],
                    "median_s": statistics.median(seconds for seconds, _ in times[1:]),
                    "peak_bytes": max(peak for _, peak in times),
                }
                for name, times in runs.items()
            },
        }


def _write_dump(trace: RoutingTrace, path: Path, seed: int) -> None:
    """Write completions as JSON lines. The expert ids of a token are in random order, as a router may return them."""
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for index in range(trace.num_sequences):
            ids = trace.sequence(index)
            ids = np.take_along_axis(ids, np.argsort(rng.random(ids.shape), axis=-1), axis=-1)
            words = rng.integers(0, 150_000, len(ids) + 1).tolist()
            prompt = int(trace.prompt_lengths[index])
            choice = {
                "index": 0,
                "text": "",
                "prompt_token_ids": words[:prompt],
                "token_ids": words[prompt:],
                "routed_experts": base64.b64encode(_npy(ids)).decode(),
            }
            file.write(json.dumps({"object": "text_completion", "choices": [choice]}) + "\n")


def _npy(array: Array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


# Measured in a process between: the peak memory of a child process includes that of its parent when it was started.
_MEASURE = """
import resource, subprocess, sys, time
start = time.perf_counter()
status = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
sys.exit(status)
"""


def _run(arguments: list[str]) -> tuple[float, int]:
    """Seconds and peak memory in bytes of a command."""
    command = [sys.executable, "-c", _MEASURE, sys.executable, "-m", "trimtab.cli.main", "-q", *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds, peak = result.stdout.split()
    return float(seconds), int(peak)


def print_figures(figures: Figures, console: Console) -> None:
    """Print the sizes, and one line per command."""
    title = (
        f"{figures['tokens'] / 1e6:.2f} M tokens x {figures['layers']} layers x top-{figures['top_k']}: "
        f"{bytes_text(figures['raw_bytes'])} of ids, {bytes_text(figures['dump_bytes'])} from vLLM, "
        f"{bytes_text(figures['file_bytes'])} as a trace ({figures['file_over_raw']:.1%})"
    )
    columns: Columns = {
        "command": "{name}",
        "median": quantity("median_s", seconds),
        "first run": quantity("first_s", seconds),
        "peak memory": quantity("peak_bytes", bytes_text),
    }
    console.print(figure_table(title, columns, named_rows(figures["commands"])))


if __name__ == "__main__":
    main("benchmarks.traces")
