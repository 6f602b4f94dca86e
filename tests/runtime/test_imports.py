"""What `import trimtab.runtime` loads: only what runs a model, so that it can be read in one sitting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
# Other balancers, a solver, files of traces, figures, commands and a compiler.
NOT_NEEDED = (
    "trimtab.policies", "trimtab.simulator", "trimtab.report", "trimtab.api", "highspy", "pyarrow", "rich", "triton"
)  # fmt: skip


def test_the_runtime_loads_what_it_needs() -> None:
    result = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    modules, ours, classes = json.loads(result.stdout)
    assert [name for name in modules if name.startswith(NOT_NEEDED)] == []
    assert len(ours) <= 130
    assert len(classes) <= 175


IN_MEMORY = """
import sys
import trimtab, trimtab.observe
from trimtab.trace import synthesize

trace = synthesize(num_sequences=16, sequence_length=32, num_layers=2, num_experts=16, top_k=2, zipf=1.5)
trimtab.plan(trace, trimtab.Run(ranks=4, token_budget=128))
print(*(name for name in ("pyarrow", "highspy") if name in sys.modules))
trimtab.write_trace(trace, sys.argv[1])
print(*(name for name in ("pyarrow", "highspy") if name in sys.modules))
"""


def test_arrow_is_imported_for_files_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IN_MEMORY, str(tmp_path / "trace.parquet")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "\npyarrow\n"
