"""What does it run on, and what does it cost? Sizes of model and cluster, and the costs that planning weighs."""

from trimtab.cluster.cost import CostModel
from trimtab.cluster.models import QWEN3_30B, ModelSpec
from trimtab.cluster.specs import ClusterSpec

__all__ = ["QWEN3_30B", "ClusterSpec", "CostModel", "ModelSpec"]
