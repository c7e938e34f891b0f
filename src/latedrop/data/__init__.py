"""What goes in: arrays, tables, batches, items, and their rows."""
