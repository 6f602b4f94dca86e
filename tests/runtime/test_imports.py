"""What `import trimtab.runtime` loads: only what runs a model, so that it can be read in one sitting."""

from __future__ import annotations

import json
import subprocess
import sys

LOADED = """
import json, sys
import trimtab.runtime

modules = sorted(sys.modules)
ours = [name for name in modules if name.split(".")[0] == "trimtab"]
classes = {
    f"{value.__module__}.{value.__qualname__}"
    for name in ours
    for value in vars(sys.modules[name]).values()
    if isinstance(value, type) and value.__module__ in ours
}
print(json.dumps([modules, ours, sorted(classes)]))
"""
# Other balancers, a solver, files of traces, figures and commands.
NOT_NEEDED = ("trimtab.policies", "trimtab.simulator", "trimtab.report", "trimtab.api", "highspy", "pyarrow", "rich")


def test_the_runtime_loads_what_it_needs() -> None:
    result = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    modules, ours, classes = json.loads(result.stdout)
    assert [name for name in modules if name.startswith(NOT_NEEDED)] == []
    assert len(ours) <= 133
    assert len(classes) <= 166
