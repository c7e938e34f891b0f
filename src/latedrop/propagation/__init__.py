"""Mean and variance of every output unit from one forward pass."""
