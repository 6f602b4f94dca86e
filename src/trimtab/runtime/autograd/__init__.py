"""What the runtime needs to know of torch's autograd."""
