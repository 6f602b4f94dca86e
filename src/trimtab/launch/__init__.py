"""Start ranks on this machine, or join a job that torchrun started."""

from trimtab.launch.launcher import launch
from trimtab.launch.namespaces import run_on_nodes

__all__ = ["launch", "run_on_nodes"]
