"""One ONNX file of a calibrated model: written from a trace with torch, read without it.

This package imports top-level modules of latedrop, and none of its other packages.
"""
