"""Home experts, their optimizer state, and the logical order of both."""
