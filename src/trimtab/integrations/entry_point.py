"""`run_entry_point`: a framework's own script in this process, after its worker class was replaced."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trimtab.errors import InputError


def run_entry_point(package: str, replace_worker: Callable[[], None], arguments: Sequence[str], default: str) -> int:
    """Replace the worker class, then run a script or module as the main program, with the arguments behind it.

    Args:
        package: of Trimtab's plugin, for `python -m trimtab.integrations.{package}`.
        replace_worker: does it in this process. Raises InputError if it can't.
        arguments: `SCRIPT [...]` or `-m MODULE [...]`.
        default: an example of these, for messages.

    Returns:
        0, or 2 with one line on stderr: without such a script or module, or where Trimtab refuses the run in this
        process.
    """
    try:
        run = _main_program(arguments, f"python -m trimtab.integrations.{package}", default)
        replace_worker()
        run()
    except InputError as error:
        # Ray raises those of actors as a class of its own, with their tracebacks.
        if type(error) is not InputError:
            raise
        print(f"trimtab: {error}", file=sys.stderr)
        return 2
    return 0


def _main_program(arguments: Sequence[str], command: str, default: str) -> Callable[[], object]:
    """Runs the script or module of a command line. Raises InputError if there is none."""
    usage = f"usage: {command} {default} [its arguments]"
    if not arguments:
        raise InputError(usage)
    first, *rest = arguments
    if first == "-m":
        if not rest:
            raise InputError(f"-m needs a module; {usage}")
        name, *rest = rest
        if not _is_module(name):
            raise InputError(f"there is no module {name}; {usage}")
        return lambda: _run(name, rest, lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))
    if first.startswith("-"):
        raise InputError(f"{first} is not an option; {usage}")
    script = Path(first)
    if not script.is_file():
        raise InputError(f"there is no script {first}; {usage}")
    return lambda: _run(first, rest, lambda: runpy.run_path(first, run_name="__main__"), folder=str(script.parent))


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _run(name: str, arguments: Sequence[str], program: Callable[[], object], folder: str | None = None) -> None:
    """As Python does it: the folder of a script is the first in which modules are looked for."""
    sys.argv = [name, *arguments]
    if folder is not None:
        sys.path.insert(0, str(Path(folder).resolve()))
    program()
