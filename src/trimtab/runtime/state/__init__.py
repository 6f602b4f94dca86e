"""Home experts: parameters, optimizer state, moves, logical order, checks for changes."""
