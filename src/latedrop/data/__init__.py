"""Read inputs and targets: arrays, tables, batches, lists of items, and their rows.

This package imports top-level modules of latedrop, and none of its other packages.
"""
