"""Boxes of object detectors: a std for each side, margins that hold, and the probability that a box is right.

It may import `prediction` and every room that this may import.
"""
