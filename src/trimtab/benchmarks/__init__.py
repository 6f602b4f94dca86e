"""Benchmarks of Trimtab. Each `bench_*.py` is a command under `trimtab bench`."""
