"""Read a data set: batches of claimed positions, and epochs."""
