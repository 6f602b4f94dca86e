"""Balance without recorded routing: choices from the counts of a layer, once its router has chosen."""
