"""Variance from masks: by draws, to first order, step by step or compiled.

It may import `network` and `data`.
"""
