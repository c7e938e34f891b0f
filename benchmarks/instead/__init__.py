"""One network with what can be learned from its validation rows, beside what one would use instead.

These are the parts of the next default, measured here; they move into the package when `calibrate` uses them.
`__main__` is the comparison: `python -m benchmarks.instead`.
"""
