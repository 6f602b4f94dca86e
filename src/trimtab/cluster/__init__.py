"""What does it run on, and what does it cost? Sizes of model and cluster, and the costs that planning weighs."""

from trimtab.cluster.cost import CostModel
from trimtab.cluster.specs import QWEN3_30B, ClusterSpec, ModelSpec

__all__ = ["QWEN3_30B", "ClusterSpec", "CostModel", "ModelSpec"]
