"""A calibrated model: how it is made, what it predicts, and how it is brought back."""
