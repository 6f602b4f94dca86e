"""Ranks of a rollout: how many compute attention and how many experts, and which experts each has."""
