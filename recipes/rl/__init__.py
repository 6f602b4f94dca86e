"""RL post-training of a small MoE: GRPO, PPO and T-PPO, balanced by Trimtab. `python -m recipes.rl.train` runs it."""
