"""`python -m benchmarks.first_answer`: processor time of the first commands after an installation, and of later ones.

Install a wheel (`make wheel`) in a new environment with a new home, and run each command there once with an empty cache
of kernels, and once again. Linux.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks.harness import Figures, main
from benchmarks.tables import Columns, figure_table, named_rows, quantity
from trimtab.cli.options import add_options
from trimtab.cli.parser import Parser
from trimtab.errors import InputError
from trimtab.report.number_text import seconds

ROOT = Path(__file__).parents[1]
MATH = "trace synth qwen3-30b-math --layers 48 --steps 2 -o math.parquet"
COMMANDS = {
    "help": "--help",
    "analyze examples/sample.parquet": f"analyze {ROOT / 'examples' / 'sample.parquet'} --ranks 8",
    "analyze, 48 layers": "analyze math.parquet --ranks 16",
    "advise, 48 layers": "advise math.parquet --ranks 16",
    "simulate, 48 layers": "simulate math.parquet --ranks 16",
}


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--wheel", type=Path, required=True, metavar="FILE", help="the wheel to install")


def run_benchmark(wheel: Path) -> Figures:
    """Figures of every command.

    Raises:
        InputError: if there is no such wheel.
    """
    if not wheel.is_file():
        raise InputError(f"{wheel}: no such file; make wheel writes dist/*.whl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        pip = [str(folder / "venv" / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, wheel.resolve()], check=True)
        (folder / "home").mkdir()
        trimtab = folder / "venv" / "bin" / "trimtab"
        kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG")}

        def run(words: str, cache: str) -> dict[str, float]:
            environment = kept | {"HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / cache)}
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            process = subprocess.Popen(
                [trimtab, *words.split()], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            assert process.stdout
            process.stdout.read(1)
            printed_s = time.perf_counter() - start
            if process.wait() or process.stdout.read() == b"":
                raise RuntimeError(f"trimtab {words}: {process.stderr.read().decode() if process.stderr else ''}")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
            return {"processor_s": used_s, "printed_s": printed_s, "peak_bytes": after.ru_maxrss * 1024}

        run(MATH, "unused")
        commands = {}
        for number, (label, words) in enumerate(COMMANDS.items()):
            first = run(words, f"cache-{number}")
            again = run(words, f"cache-{number}")
            commands[label] = {"first_s": first["processor_s"], "printed_s": first["printed_s"]} | {
                "again_s": again["processor_s"]
            }
    return {"schema": "trimtab-bench-first-answer-1", "python": sys.version.split()[0], "commands": commands}


def print_figures(figures: Figures, console: Console) -> None:
    """Print one line per command."""
    columns: Columns = {
        "command": "{name}",
        "first run": quantity("first_s", seconds),
        "first output after": quantity("printed_s", seconds),
        "again": quantity("again_s", seconds),
    }
    title = f"Processor time after an installation, Python {figures['python']}"
    console.print(figure_table(title, columns, named_rows(figures["commands"])))


if __name__ == "__main__":
    main("benchmarks.first_answer")
