"""`benchmarks.host`, and its grouped product against one product after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.grouped_linear import GroupedLinear
from benchmarks.host import CASES
from trimtab.cluster import ModelSpec

# Of a planned call of a layer, without and with replicas.
MOST_MORE_CALLS = (80, 480)
ROOT = Path(__file__).parents[2]


def test_grouped_products() -> None:
    """Some experts have no rows; gradients of weights are added to what is in `main_grad`."""
    torch.manual_seed(0)
    config = SimpleNamespace(params_dtype=torch.float32, expert_model_parallel_size=1)
    linear = GroupedLinear(4, 8, 16, config=config, init_method=torch.nn.init.normal_)
    weights = list(linear.parameters())
    for weight in weights:
        weight.main_grad = torch.ones(16, 8)  # type: ignore[attr-defined]
    counts = [3, 0, 1, 5]
    rows = torch.randn(9, 8, requires_grad=True)
    output, biases = linear(rows, counts)
    assert biases is None
    again = [weight.detach().double().requires_grad_() for weight in weights]
    rows_again = rows.detach().double().requires_grad_()
    expected = torch.cat([part @ weight.T for part, weight in zip(rows_again.split(counts), again, strict=True)])
    torch.testing.assert_close(output, expected.float())
    factors = torch.randn_like(output)
    (output * factors).sum().backward()
    (expected * factors).sum().backward()
    assert rows.grad is not None
    assert rows_again.grad is not None
    torch.testing.assert_close(rows.grad, rows_again.grad.float())
    for weight, like in zip(weights, again, strict=True):
        assert like.grad is not None
        torch.testing.assert_close(weight.main_grad, (1 + like.grad).float())  # type: ignore[attr-defined]


@given(st.integers(2, 8), st.floats(1.0, 2.0), st.integers(0, 5))
@settings(max_examples=15)
def test_routing_has_different_experts_and_the_wanted_imbalance(ranks: int, ratio: float, seed: int) -> None:
    from benchmarks.megatron_layers import LayerCase

    model = ModelSpec("small", 8 * ranks, 4, hidden_size=64, expert_width=32)
    routing = LayerCase(model, 512, ratio, layers=1).routing(ranks, seed)
    ids_NK = np.concatenate([ids[:, 0] for of_rank in routing for ids in of_rank])
    assert all(len(set(row)) == model.top_k for row in ids_NK[:50].tolist())
    loads_R = np.bincount(ids_NK.ravel() // 8, minlength=ranks)
    assert loads_R.max() / loads_R.mean() == pytest.approx(ratio, abs=0.12)


@pytest.mark.nightly
@pytest.mark.slow
def test_figures(tmp_path: Path) -> None:
    words = ["--layers", "1", "2", "--micro-batches", "2", "--rounds", "2", "--json"]
    command = [sys.executable, "-m", "benchmarks.host", *words, str(tmp_path / "host.json")]
    subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    cases = json.loads((tmp_path / "host.json").read_text())["cases"]
    assert [(case["experts"], case["ranks"], case["replicas"], case["layers"]) for case in cases] == [
        (case.experts, case.ranks, case.replicas, layers) for case in CASES for layers in (1, 2)
    ]
    for case in cases:
        assert {name: len(seconds) for name, seconds in case["step_s"].items()} == dict.fromkeys(
            ("plain", "planned", "planning"), 2
        )
        plain, planned, planning = (np.array(case["step_s"][name]) for name in ("plain", "planned", "planning"))
        assert (planning < planned).all()
        assert case["ratio"] == np.median(planned / plain)
        assert case["micro_batch_ms"]["planning"] == pytest.approx(np.median(planning) / 2 * 1e3)
        layer, most = case["calls"]["layer"], 1.1 * MOST_MORE_CALLS[min(1, case["replicas"])]
        assert layer["planned"] - layer["plain"] < most
