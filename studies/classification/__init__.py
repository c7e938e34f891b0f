"""Measure probabilities of classes: on usual rows, on shifted rows, and for telling strange ones."""
