"""Start ranks on this machine, or join a job that torchrun started."""

from trimtab.launch.launcher import launch

__all__ = ["launch"]
