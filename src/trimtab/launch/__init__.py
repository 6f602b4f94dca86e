"""Start ranks on this machine, or join a job that torchrun started."""
