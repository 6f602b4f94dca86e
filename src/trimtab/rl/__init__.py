"""RL post-training around the runtime: rollout, reward, recompute, update. The main job, `trimtab train`."""
