"""`trimtab`: run a command; print input errors as one line and exit with status 2."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from importlib import import_module
from typing import NoReturn

from trimtab import __version__
from trimtab.errors import InputError, RankFailedError

# Only the requested command is imported, so help is fast.
COMMANDS = {
    "train": "post-train a MoE with RL on local ranks, balanced by Trimtab",
    "trace": "inspect, convert or make routing traces",
    "analyze": "cost of imbalance in a trace, its layers, and gains of known routing",
    "plan": "plan a step of a trace for a cluster",
    "simulate": "step time of every balancer on a cluster",
    "calibrate": "measure this machine and write a cluster file",
    "bench": "reproduce the figures of README and docs",
    "nodes": "run a command on several nodes on this machine, joined by slow links",
    "doctor": "check an installation, a model and one micro-step before a long run",
}


# Full or read-only disk, quota, or shell limit.
UNWRITABLE = (errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EROFS)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    asked = next((word for word in arguments if word in COMMANDS), "")
    try:
        options = _parse(arguments, asked)
        return options.run(options) or 0
    except InputError as error:
        print(f"trimtab {asked}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (such as head) has closed the pipe; also avoid an error when the interpreter flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        print(f"trimtab {asked}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        print(f"trimtab {asked}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except RankFailedError as error:
        print(f"trimtab {asked}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"trimtab {asked}: interrupted", file=sys.stderr)
        return 130


def _parse(arguments: list[str], asked: str) -> argparse.Namespace:
    parser = _Parser(
        prog="trimtab",
        description="Load balancing for Mixture-of-Experts models in RL post-training, planned from known routing.",
        epilog="example: trimtab trace synth rl-mixed -o out/mixed.parquet && trimtab analyze out/mixed.parquet",
    )
    parser.add_argument("--version", action="version", version=f"trimtab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for command, about in COMMANDS.items():
        if command == asked:
            import_module(f"trimtab.cli.{command}").add(commands)
        else:
            commands.add_parser(command, help=about)
    options = parser.parse_args(arguments)
    options.arguments = arguments
    return options


if __name__ == "__main__":
    sys.exit(main())
