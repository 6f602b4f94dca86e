"""`python -m trimtab`: the same as the command `trimtab`."""

import sys

from trimtab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
