"""The command `trimtab`, also as `python -m trimtab`."""

import signal
import sys

from trimtab.interrupts import end_now


def main() -> int:
    """Run the command of `sys.argv`. Ctrl-C while it is imported ends it without a stack. Returns the exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_now)
    from trimtab.cli.main import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
