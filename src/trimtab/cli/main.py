"""`trimtab`: find the command, run it, turn a user's mistake into one line and exit status 2."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from trimtab import __version__
from trimtab.cli import analyze, bench, calibrate, doctor, nodes, plan, simulate, trace, train
from trimtab.errors import InputError, RankFailedError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    parser = _Parser(
        prog="trimtab",
        description="Load balancing for Mixture-of-Experts models in RL post-training, planned from known routing.",
        epilog="example: trimtab train --out out/demo && trimtab plan out/demo/routing/step-00000.parquet --ranks 4",
    )
    parser.add_argument("--version", action="version", version=f"trimtab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for command in (train, trace, analyze, plan, simulate, calibrate, bench, nodes, doctor):
        command.add(commands)
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
    try:
        status = options.run(options)
    except InputError as error:
        print(f"trimtab {options.command}: {error}", file=sys.stderr)
        return 2
    except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        print(f"trimtab {options.command}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except RankFailedError as error:
        print(f"trimtab {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"trimtab {options.command}: interrupted", file=sys.stderr)
        return 130
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
