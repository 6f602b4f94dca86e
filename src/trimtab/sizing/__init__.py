"""How many ranks of a rollout should compute attention, and how many experts."""
