"""A calibrated model: how it is made, what it predicts, and how it is brought back.

It may import `calibration`, `detection` and every room that these may import, and `onnx_files`.
"""
