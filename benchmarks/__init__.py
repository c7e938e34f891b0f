"""Measurements, side by side and in one run: config in, JSON out, figures from JSON alone."""
