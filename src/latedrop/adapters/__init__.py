"""Thin adapters: a predictor where another library expects its own kind of object.

One module per library, imported only by who uses it: `latedrop.adapters.sklearn`, `latedrop.adapters.lightning`,
`latedrop.adapters.huggingface`.

It may import every room below it: `prediction`, `evaluation`, `onnx_files` and what these may import.
"""
