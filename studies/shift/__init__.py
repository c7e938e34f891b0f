"""Measure the variance of a network beyond the rows that it was trained on."""
