"""Which sequences share a micro-step and a rank."""
