"""Replicas and token split of every instance, and the paths of their weights."""
