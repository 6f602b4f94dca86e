"""MoE layers in the training loop: calls of a layer, micro-steps, dispatch, autograd nodes, backwards."""
