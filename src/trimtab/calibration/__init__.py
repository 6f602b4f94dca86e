"""Measures the rates of this machine, as a `ClusterSpec`: what `trimtab calibrate` does."""
