"""What does it run on? The model's and the cluster's sizes that planning needs."""

from trimtab.cluster.specs import ClusterSpec, ModelSpec

__all__ = ["ClusterSpec", "ModelSpec"]
