"""One MoE layer in the training loop: its micro-steps, instances, dispatch and autograd nodes."""
