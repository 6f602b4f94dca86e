"""The model of a trace: given, named in the trace, or assumed; `overrides`, and traces of models with zero experts."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trimtab
from helpers.calls import called
from trimtab import InputError, ModelSpec, RoutingTrace, read_trace, write_trace
from trimtab.api.model_choice import model_of
from trimtab.cli.main import main
from trimtab.trace import synthesize


def trace_of(model: str, layers: int = 2, experts: int = 128, top_k: int = 8) -> RoutingTrace:
    trace = synthesize(
        num_sequences=8, sequence_length=16, num_layers=layers, num_experts=experts, top_k=top_k, zipf=1.5
    )
    return replace(trace, model=model)


@pytest.mark.parametrize(
    ("label", "layers", "name"),
    [
        ("qwen3-235b-a22b", 2, "qwen3-235b-a22b"),
        ("/models/GLM-4.5-Air-FP8", 2, "glm-4.5-air"),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507", 94, "qwen3-235b-a22b"),
        # Names of no preset, of one with other experts, of one with fewer layers.
        ("synthetic rl-mixed", 48, "qwen3-30b-a3b"),
        ("mixtral-8x7b", 45, "glm-4.5-air"),
        ("glm-4.5-air", 48, "qwen3-30b-a3b"),
    ],
)
def test_a_named_model_comes_before_one_like_it(
    label: str, layers: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="trimtab")
    found = model_of("t", trace_of(label, layers), None)
    assert found == ModelSpec.named(name)
    is_named = label not in ("synthetic rl-mixed", "mixtral-8x7b", "glm-4.5-air")
    assert len(caplog.messages) == (0 if is_named else 1)
    assert is_named or f"model: {name} is assumed, by experts and top-k; the trace names {label}" in caplog.text


def test_a_given_model_comes_first() -> None:
    trace = trace_of("qwen3-235b-a22b")
    assert model_of("t", trace, "glm-4.5-air") == ModelSpec.named("glm-4.5-air")
    own = replace(ModelSpec.named("glm-4.5-air"), name="own")
    assert model_of("t", trace, own) is own
    with pytest.raises(InputError, match="t is not of model mixtral-8x7b"):
        model_of("t", trace, "mixtral-8x7b")
    for given in (None, own):
        with pytest.raises(InputError, match="--set vocab_size: needs --model"):
            model_of("t", trace, given, {"vocab_size": 5})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("simulate", {"ranks": 4, "micro_steps": 1, "policies": ["static"]}),
        ("analyze", {"ranks": 4, "micro_steps": 1}),
        ("plan", {"ranks": 4, "token_budget": 64, "policy": "eplb_oracle"}),
    ],
)
def test_functions_take_overrides_and_the_traces_model(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    write_trace(trace_of("Qwen/Qwen3-235B-A22B"), tmp_path / "t.parquet")

    def model_in(**changed: Any) -> Any:
        result = called(getattr(trimtab, name), tmp_path / "t.parquet", **settings, **changed)
        if name == "simulate":
            return result.case.model.name, result.case.model.expert_width
        if name == "analyze":
            return result.analysis.estimate.model, result.analysis.estimate.step_s
        return result.weight_bytes_per_micro_step

    assert model_in() == model_in(model="qwen3-235b-a22b")
    assert model_in(model="qwen/qwen3-235b-a22b") == model_in()
    assert model_in(model="qwen3-235b-a22b", overrides={"moe_intermediate_size": 64}) != model_in()
    with pytest.raises(InputError, match="--set moe_width: no key that"):
        model_in(model="qwen3-235b-a22b", overrides={"moe_width": 64})


def test_set_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(trace_of(""), tmp_path / "t.parquet")
    words = ["simulate", str(tmp_path / "t.parquet"), "--ranks", "4", "--policy", "static", "--micro-steps", "1"]
    words += ["--json", str(tmp_path / "s.json")]
    assert main([*words, "--model", "glm-4.5-air", "--set", "num_hidden_layers=4", "--set", "mlp_only_layers=[1]"]) == 0
    model = json.loads((tmp_path / "s.json").read_text())["model"]
    assert (model["moe_layers"], model["dense_layers"], model["moe_layer_indices"]) == (2, 2, [2, 3])
    assert "is assumed" not in capsys.readouterr().err
    assert main(words) == 0
    assert "model: qwen3-30b-a3b is assumed, by experts and top-k; the trace names no model" in capsys.readouterr().err


def test_keys_that_are_not_read_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(trace_of(""), tmp_path / "t.parquet")
    config = {
        "model_type": "newmoe", "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 64,
        "moe_intermediate_size": 32, "num_hidden_layers": 2, "mystery_layers": [1, 0], "rope_theta": 10_000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["analyze", str(tmp_path / "t.parquet"), "--ranks", "4", "--model", str(tmp_path / "config.json")]
    assert main(words) == 0
    error = capsys.readouterr().err
    assert error.count("newmoe") == 1
    assert "model type newmoe is unknown" in error
    assert "keys that are not read: mystery_layers (override sizes with --set KEY=VALUE)" in error


def test_traces_with_zero_experts_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="t counts the 256 zero experts of longcat-flash as experts"):
        model_of("t", trace_of("", 1, experts=768, top_k=12), "longcat-flash")
    real = trace_of("", 1, experts=512, top_k=12)
    assert model_of("t", real, "longcat-flash") == ModelSpec.named("longcat-flash")
    np.savez(tmp_path / "d.npz", routed_experts=np.zeros((4, 28, 12), np.int16))
    words = ["trace", "import", str(tmp_path / "d.npz"), "-o", str(tmp_path / "o.parquet"), "--format", "arrays"]
    assert main([*words, "--model", "meituan-longcat/LongCat-Flash-Chat"]) == 2
    assert "its router also chooses among 256 zero experts" in capsys.readouterr().err


def test_an_imported_dump_keeps_the_models_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((6, 24, 32)), axis=-1)[:, :, :4].astype(np.int16)
    np.savez(tmp_path / "d.npz", expert_ids=ids, sequence_starts=np.array([0, 6]))
    words = ["trace", "import", str(tmp_path / "d.npz"), "-o", str(tmp_path / "o.parquet"), "--format", "arrays"]
    assert main([*words, "--model", "openai/gpt-oss-20b"]) == 0
    assert read_trace(tmp_path / "o.parquet").model == "gpt-oss-20b"
    assert main([*words, "--set", "num_experts=4"]) == 2
    assert model_of("t", read_trace(tmp_path / "o.parquet"), None) == ModelSpec.named("gpt-oss-20b")
