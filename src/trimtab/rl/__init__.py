"""RL post-training with the runtime: rollout, reward, recompute, update. `trimtab train` runs it."""
