"""Detect rows unlike those that a model was calibrated on, by scores with p-values.

This package imports `calibration`, and packages that `calibration` may import.
"""
