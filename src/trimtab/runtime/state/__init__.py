"""Home experts: parameters, optimizer state, renumbering, whole state, checks for changes."""
