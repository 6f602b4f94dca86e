"""Sizes of model and cluster, and the costs that planning minimises."""

from trimtab.cluster.attention import AttentionLayers
from trimtab.cluster.model_names import preset_of, preset_of_label
from trimtab.cluster.models import ModelSpec, default_model, load_model, model_like, read_checkpoint, read_model
from trimtab.cluster.parallel_layout import Layout
from trimtab.cluster.spec_files import load_cluster, write_cluster
from trimtab.cluster.specs import ClusterSpec
from trimtab.cluster.step_costs import StepCosts

__all__ = [
    "QWEN3_30B",
    "AttentionLayers",
    "ClusterSpec",
    "Layout",
    "ModelSpec",
    "StepCosts",
    "default_model",
    "load_cluster",
    "load_model",
    "model_like",
    "preset_of",
    "preset_of_label",
    "read_checkpoint",
    "read_model",
    "write_cluster",
]

QWEN3_30B: ModelSpec


def __getattr__(name: str) -> ModelSpec:
    """`QWEN3_30B`, which is read when it is first used."""
    if name == "QWEN3_30B":
        return default_model()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
