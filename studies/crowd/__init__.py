"""The paper's second experiment: counting people."""
