"""The commands below `latedrop crowd`: parse, call, print; no mathematics."""
