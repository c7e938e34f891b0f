"""How draws run fast."""
