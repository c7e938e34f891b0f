"""Rows unlike those that a model was calibrated on, told by scores with p-values."""
