"""Communication: collectives with a gradient, point-to-point transfers."""
