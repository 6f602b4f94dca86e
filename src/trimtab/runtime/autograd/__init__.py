"""Uses of torch's autograd: state of the engine, substituted values, gradient accumulation."""
