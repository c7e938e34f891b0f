"""One ONNX file of a calibrated model: written from a trace with torch, read without it.

It may import the modules beside the rooms, and no room.
"""
