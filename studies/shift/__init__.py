"""What the variance of a network is worth beyond the rows that it was trained on."""
