"""What ms-swift imports with `--external_plugins`: balances the trainer of this process; see docs/frameworks.md.

ms-swift puts this file's folder first in `sys.path`, so there is nothing else in it.
"""

from trimtab.integrations.ms_swift import install

install()
