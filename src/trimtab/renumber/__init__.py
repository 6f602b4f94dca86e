"""A checkpoint with the experts of its layers in another order, which computes the same function."""
