"""The paper's experiments: a configuration in, JSON out, figures from the JSON alone."""
