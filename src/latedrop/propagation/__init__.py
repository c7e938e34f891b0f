"""Mean and variance of every output unit from one forward pass.

It may import `dropout`, `network` and `data`.
"""
