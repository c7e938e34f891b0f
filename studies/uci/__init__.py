"""The paper's first experiment: eight regression sets."""
