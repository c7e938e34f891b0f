"""A local page for whoever made a model: its test rows, one by one, with their intervals. `latedrop explore`."""
