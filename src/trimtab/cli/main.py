"""`trimtab`: run a command; print input errors as one line and exit with status 2."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from importlib import import_module
from io import TextIOWrapper

from trimtab import __version__
from trimtab.cli.parser import Parser
from trimtab.errors import InputError, RankFailedError
from trimtab.files import write_problem
from trimtab.interrupts import end_now
from trimtab.messages import show_messages, visible

log = logging.getLogger("trimtab")

# Only the requested command is imported, so help is fast.
COMMANDS = {
    "trace": "inspect, convert or make routing traces",
    "init": "write a settings file for advise, analyze, plan, rollout and simulate",
    "advise": "what to do about imbalance on a cluster, and what it gains",
    "analyze": "cost of imbalance in a trace, its layers, and gains of known routing",
    "plan": "plan a step of a trace for a cluster",
    "simulate": "step time of every balancer on a cluster",
    "renumber": "write a checkpoint with experts in an order that balances ranks",
    "rollout": "size a rollout: attention and experts on the same ranks or on separate ones",
    "calibrate": "measure this machine and write a cluster file",
    "doctor": "check an installation, a model and one micro-step before a long run",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    # Kernels for any processor of this kind, as the wheel has them: no slower, and the cache fits all machines.
    os.environ.setdefault("NUMBA_CPU_NAME", "generic")
    # Gives back what was read; others keep up to 100 MB.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    asked = next((word for word in arguments if word in COMMANDS), "")
    return run(f"trimtab {asked}", lambda: _parse(arguments, asked))


def make_parser(asked: Collection[str]) -> Parser:
    """The parser, with the options of these commands."""
    parser = Parser(
        prog="trimtab",
        description="Load balancing for Mixture-of-Experts models in RL post-training, planned from known routing.",
        examples=[
            "trimtab trace synth qwen3-30b-mixed -o out/mixed.parquet",
            "trimtab analyze out/mixed.parquet --ranks 16",
        ],
    )
    parser.add_argument("--version", action="version", version=f"trimtab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, about in COMMANDS.items():
        if command in asked:
            import_module(f"trimtab.cli.{command}").add(commands)
        else:
            commands.add_parser(command, help=about)
    return parser


def run(name: str, parse: Callable[[], argparse.Namespace]) -> int:
    """Parse options and call `options.run(options)`. Prints errors after the command's name; returns the status."""
    for name_of_stream in ("stdout", "stderr"):
        # Closed by the caller.
        if getattr(sys, name_of_stream) is None:
            setattr(sys, name_of_stream, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # In a locale without Unicode.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        if sys.platform == "win32":
            raise InputError("Trimtab runs on Linux and macOS; on Windows, use it in WSL")
        options = parse()
        show_messages(getattr(options, "log_level", logging.INFO))
        # Not at the top: these take as long as the help may take.
        from trimtab.cli.options import need_extra
        from trimtab.cli.output import check_outputs

        need_extra(*getattr(options, "needs", ()))
        check_outputs(options)
        # From here on, files may be half-written.
        if signal.getsignal(signal.SIGINT) is end_now:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        start = time.perf_counter()
        status = options.run(options) or 0
        sys.stdout.flush()
        log.debug("trimtab %s: %.1f s", __version__, time.perf_counter() - start)
        return status
    except InputError as error:
        return _failed(name, error, 2)
    except BrokenPipeError:
        # The reader (such as head) has closed the pipe; also avoid an error when the interpreter flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # Writes to standard output have no file's name, nor has the request for a directory that was removed.
        nameless = "working directory" if error.errno == errno.ENOENT else "standard output"
        if (problem := write_problem(error, nameless)) is None:
            raise
        return _failed(name, problem, 2)
    except MemoryError as error:
        return _failed(name, f"not enough memory{f': {error}' if str(error) else ''}", 1)
    except RankFailedError as error:
        return _failed(name, error, 1)
    except KeyboardInterrupt:
        return _failed(name, "interrupted", 130)


def _failed(name: str, reason: object, status: int) -> int:
    print(visible(f"{name}: {reason}"), file=sys.stderr)
    return status


def _parse(arguments: list[str], asked: str) -> argparse.Namespace:
    options = make_parser([asked]).parse_args(arguments)
    if getattr(options, "settings", None):
        from trimtab.cli.settings import apply_settings

        apply_settings(options)
    options.arguments = arguments
    return options


if __name__ == "__main__":
    sys.exit(main())
