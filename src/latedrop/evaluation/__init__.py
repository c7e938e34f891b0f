"""The worth of a calibrated model on test rows: scores, groups of rows, a judgement, and requirements on it.

It may import `prediction` and every room that this may import.
"""
