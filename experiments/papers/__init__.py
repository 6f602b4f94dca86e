"""Published figures of papers, and those of the simulator in similar set-ups."""
