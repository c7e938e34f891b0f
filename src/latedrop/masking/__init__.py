"""Masks of units, and where they are put into a model."""
