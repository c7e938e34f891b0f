"""Define networks, methods and measures that the UCI study and the shift study share."""
