"""From measured variances to calibrated predictions."""
