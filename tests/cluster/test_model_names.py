"""Hub ids and labels of frameworks as names of presets."""

from __future__ import annotations

import json

import pytest

from trimtab import ModelSpec
from trimtab.cluster import load_model, preset_of, preset_of_label
from trimtab.cluster.model_names import hub_ids
from trimtab.cluster.presets import preset_names, read_preset


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("qwen/qwen3-30b-a3b", "qwen3-30b-a3b"),
        *((f"Qwen/Qwen3-30B-A3B{end}", "qwen3-30b-a3b") for end in ("", "-Base", "-Instruct-2507")),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507-FP8", "qwen3-235b-a22b"),
        ("QWEN3-30B-A3B", "qwen3-30b-a3b"),
        *((f"deepseek-ai/DeepSeek-{name}", "deepseek-v3") for name in ("V3", "V3-0324", "R1-0528")),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek-v3.2"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano-30b-a3b"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16", "nemotron-3-nano-30b-a3b"),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", "llama-4-maverick"),
        ("baidu/ERNIE-4.5-300B-A47B-Base-PT", "ernie-4.5-300b-a47b"),
        *((text, None) for text in ("mistralai/Mixtral-8x22B-v0.1", "someone/Qwen3-30B-A3B", "")),
        *((text, None) for text in ("Qwen/Qwen3-30B-A3B-pruned", "Qwen3-30B-A3B/")),
    ],
)
def test_hub_ids_and_their_variants_are_names(text: str, preset: str | None) -> None:
    assert preset_of(text) == preset
    if preset:
        assert load_model(text) == ModelSpec.named(text) == ModelSpec.named(preset)
        assert load_model(text).name == preset


@pytest.mark.parametrize(
    ("label", "preset"),
    [
        ("/data/models/Qwen3-30B-A3B-Instruct-2507/", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("unsloth/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("glm-4.5-air", "glm-4.5-air"),
        ("C:\\models\\GLM-4.5-Air", "glm-4.5-air"),
        ("synthetic rl-mixed", None),
        ("qwen3_moe", None),
        ("", None),
    ],
)
def test_labels_of_dumps(label: str, preset: str | None) -> None:
    assert preset_of_label(label) == preset


def test_every_preset_has_hub_ids_of_its_own() -> None:
    assert len(hub_ids()) == len({name.lower() for name in hub_ids()})
    for name in preset_names("model"):
        content = json.loads(read_preset("model", name) or "")
        assert content["hub_ids"]
        assert all(preset_of(hub_id) == name and hub_id.count("/") == 1 for hub_id in content["hub_ids"])
