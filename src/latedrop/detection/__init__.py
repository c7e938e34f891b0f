"""Rows unlike those that a model was calibrated on, told by scores with p-values.

It may import `calibration` and every room that this may import.
"""
