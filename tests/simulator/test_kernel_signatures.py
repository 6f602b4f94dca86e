"""Every kernel of policies and simulator is compiled once: no extra signatures for literals, dtypes or layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Compiles without a cache, as the first command after an installation does: cached code has no inner signatures.
SIGNATURES = """
import importlib, json, pkgutil
import numpy as np
from numba.core.registry import CPUDispatcher
import trimtab.policies, trimtab.simulator
from trimtab import RoutingTrace, Run
from trimtab.api.simulate import simulate
from trimtab.cluster import ModelSpec

rng = np.random.default_rng(0)
skew_LE = rng.gumbel(size=(2, 8)) * 2
ids = [np.argsort(-rng.gumbel(size=(40, 2, 8)) - skew_LE, axis=-1)[:, :, :2] for _ in range(24)]
trace = RoutingTrace.from_sequences(ids, num_experts=8)
trace.steps[12:] = 1
sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "expert_width": 32, "shared_width": 32}
model = ModelSpec("small", moe_layers=2, vocab_size=100, **sizes)
sizes = {"model": model, "ranks": 4, "ranks_per_node": 2, "micro_steps": 2, "groups": 2}
for equal_terms, slots in ((False, 2), (True, 1)):
    names = tuple(trimtab.policies.POLICIES)
    simulate(trace, Run(recompute=not equal_terms, slots=slots, **sizes), policies=names, equal_terms=equal_terms)
simulate(trace, Run(pp=2, **sizes), policies=("static",))
found = {}
for package in (trimtab.policies, trimtab.simulator):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, CPUDispatcher) and value.__module__ == module.name:
                found[module.name + "." + name] = len(value.signatures)
print(json.dumps(found))
"""


@pytest.mark.long
def test_every_kernel_has_one_signature(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SIGNATURES]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found) > 25
    assert {name: count for name, count in found.items() if count != 1} == {}
