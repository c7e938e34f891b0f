"""What varies: the variance of a prediction, by draws, to first order, or carried through the layers."""
