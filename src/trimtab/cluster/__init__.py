"""Sizes of model and cluster, and the costs that planning minimises."""

from trimtab.cluster.cost import CostModel
from trimtab.cluster.models import QWEN3_30B, ModelSpec, load_model, model_like
from trimtab.cluster.spec_files import load_cluster, write_cluster
from trimtab.cluster.specs import ClusterSpec

__all__ = [
    "QWEN3_30B",
    "ClusterSpec",
    "CostModel",
    "ModelSpec",
    "load_cluster",
    "load_model",
    "model_like",
    "write_cluster",
]
