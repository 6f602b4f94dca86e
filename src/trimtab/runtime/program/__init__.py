"""What each layer of a micro-step does with its rows, complete before the layer is called."""
