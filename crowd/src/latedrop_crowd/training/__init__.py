"""Training MCNN on annotated frames: settings, batches, the loop with its checkpoints, counts, the log."""
