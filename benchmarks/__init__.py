"""Benchmarks of Trimtab: `python -m benchmarks.NAME` in the root of the repository, in the environment of `make`."""
