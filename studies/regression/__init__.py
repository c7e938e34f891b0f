"""Networks, methods and measures that the UCI and the shift study share."""
