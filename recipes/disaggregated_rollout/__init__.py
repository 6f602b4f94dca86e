"""A rollout with attention and experts on different ranks. `python -m recipes.disaggregated_rollout.train` runs it."""
