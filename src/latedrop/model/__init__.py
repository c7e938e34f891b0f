"""The user's model: read, called, and left as it was."""
