"""Classes: probabilities that mean what they say, for a trained classifier."""
