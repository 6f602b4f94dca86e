"""Skew of the synthetic presets next to published skew: `python -m experiments.presets`."""
