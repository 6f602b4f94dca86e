"""The home rank of every expert, and copies in fixed slots."""
